"""Masked diffusion over whole responses, as LLaDA and Dream are trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import extend_to_multiple, shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Masked(Objective):
    """Masks response tokens independently and predicts them from all others, in both directions.

    Supervised fine-tuning of LLaDA (arXiv 2502.09992, equation 5): p = (1 - eps) t + eps with one t per sample; the
    loss is, for each sample, the sum over masked tokens of cross-entropy / p, divided by the response length; then
    the mean over samples. The only term is ``mdm``. Deliberate difference: LLaDA pads responses with end-of-sequence
    tokens to the longest of the batch; here they are padded to a multiple of ``pad_responses_to``, so that a sample's
    loss does not depend on the rest of its batch.

    Attributes:
        eps: Smallest mask probability, in (0, 1].
        pad_responses_to: Lengthen responses with end-of-sequence tokens, masked and scored like any other, to a
            multiple of this; at least 1. Set it to the canvas length that decoders will use, so that the model learns
            to end on a canvas longer than the answer. ``None``: no lengthening.
        shifted: The hidden state at position i - 1 predicts the mask at position i, as the head of an autoregressive
            model does (Dream, arXiv 2508.15487). A sample without a prompt then has no target for its first token.
        cart_p: Replace 1 / p by Dream's context-adaptive token-level weights (CART, arXiv 2508.15487) of this
            sharpness, in (0, 1]: a mask weighs more, the more clean tokens are near it. The rest of the normalisation
            stays. ``None``: 1 / p.
    """

    term = "mdm"
    ranges = {"eps": "(0, 1]", "pad_responses_to": 1, "cart_p": "(0, 1]"}
    eps: float = 1e-3
    pad_responses_to: int | None = None
    shifted: bool = False
    cart_p: float | None = None

    @property
    def traits(self) -> ModelTraits:
        """Bidirectional attention; masks predict themselves or, shifted, are predicted by the position before."""
        return ModelTraits(attention="bidirectional", predictions=("mask_shifted" if self.shifted else "mask",))

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens independently; see :meth:`Objective.corrupt`."""
        if self.pad_responses_to is not None:
            batch = extend_to_multiple(batch, self.pad_responses_to, special_tokens)
        probability = mask_probability(noise, self.eps, mask_ratio)
        num_tokens = batch.input_ids.shape[1]
        is_masked = batch.in_response & (noise.uniform("token_mask", num_tokens) < probability[:, None])
        weights = (1 / probability)[:, None]
        if self.cart_p is not None:
            weights = cart_weights(~is_masked & batch.is_real, self.cart_p)
        weights = (weights / batch.response_lengths[:, None]).float().where(is_masked, 0.0)
        labels = batch.input_ids.where(is_masked, IGNORE_INDEX)
        if self.shifted:
            labels = shift_left(labels, IGNORE_INDEX)
            weights = shift_left(weights, 0.0)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=batch.positions.expand_as(labels),
            labels=labels,
            weights=weights,
            terms=torch.zeros_like(labels),
            counts=labels.new_full((1,), len(labels)).float(),  # explicit: the default type may be bfloat16
            visible=batch.bidirectional,
            is_masked=is_masked,
            is_real=batch.is_real,
        )


def cart_weights(is_clean: Bool[Tensor, "batch token"], sharpness: float) -> Float[Tensor, "batch token"]:
    """Weigh positions by the clean tokens around them: half the sum over these of p (1 - p)^(distance - 1).

    The geometric kernel of CART (Dream, arXiv 2508.15487). Prompt tokens are clean, padding is not.

    Args:
        is_clean: Positions that hold a token and no mask.
        sharpness: p of the geometric distribution, in (0, 1]; 1 counts direct neighbours only.
    """
    positions = torch.arange(is_clean.shape[1], device=is_clean.device)
    distance = (positions[:, None] - positions).abs().double()
    kernel = sharpness * (1 - sharpness) ** (distance - 1).clamp(min=0)
    return 0.5 * is_clean.float() @ kernel.float().masked_fill(distance == 0, 0.0)
