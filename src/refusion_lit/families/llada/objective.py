"""Masked diffusion over whole responses, as LLaDA and Dream are trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id, response_positions
from refusion_lit.learning.text_order import extend_to_multiple, shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least, require_number


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
    eps: float = 1e-3
    pad_responses_to: int | None = None
    shifted: bool = False
    cart_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse options that cannot be trained with."""
        super().__post_init__()
        require_number("objective.eps", self.eps, "(0, 1]")
        require_at_least("objective.pad_responses_to", self.pad_responses_to, 1, optional=True)
        if self.cart_p is not None:
            require_number("objective.cart_p", self.cart_p, "(0, 1]", "set it in that range, or to null")

    @property
    def traits(self) -> ModelTraits:
        """Bidirectional attention; masks predict themselves or, shifted, are predicted by the position before."""
        return ModelTraits(attention="bidirectional", predictions=("mask_shifted" if self.shifted else "mask",))

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens independently; see :meth:`Objective.corrupt`."""
        mask_token_id = required_mask_id(self, special_tokens)
        if self.pad_responses_to is not None:
            batch = extend_to_multiple(batch, self.pad_responses_to, special_tokens)
        probability = mask_probability(noise, self.eps, mask_ratio)
        positions, in_response = response_positions(batch)
        is_masked = in_response & (noise.uniform("token_mask", len(positions)) < probability[:, None])

        lengths = batch.prompt_lengths + batch.response_lengths
        is_real = positions < lengths[:, None]
        weights = (1 / probability)[:, None]
        if self.cart_p is not None:
            weights = cart_weights(~is_masked & is_real, self.cart_p)
        weights = (weights / batch.response_lengths[:, None]).float().where(is_masked, 0.0)
        labels = batch.input_ids.where(is_masked, IGNORE_INDEX)
        if self.shifted:
            labels, weights = shift_left(labels, IGNORE_INDEX), shift_left(weights, 0.0)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, mask_token_id),
            position_ids=positions.expand_as(labels),
            labels=labels,
            weights=weights,
            terms=torch.zeros_like(labels),
            counts=labels.new_full((1,), len(labels)).float(),  # explicit: the default type may be bfloat16
            visible=all_of(lengths, len(positions)),
            is_masked=is_masked,
            is_real=is_real,
        )


def all_of(lengths: Int[Tensor, " batch"], num_tokens: int) -> Int[Tensor, "batch token range 2"]:
    """Let every token, padding too, see all tokens of its text."""
    everything = torch.stack((torch.zeros_like(lengths), lengths), -1)
    return repeat(everything, "batch bound -> batch token 1 bound", token=num_tokens)


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
