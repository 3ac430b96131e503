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
    """Masks response tokens independently and predicts them from all other tokens, in both directions.

    Supervised fine-tuning of LLaDA (arXiv 2502.09992, equation 5): a sample draws t, and its tokens are masked with
    probability p = (1 - eps) t + eps. A sample's loss sums cross-entropy / p over masked tokens and divides by the
    response length. The only term, ``mdm``, is the mean over samples. Deliberate difference: LLaDA pads responses with
    EOS tokens to the longest in the batch; here they are padded to a multiple of ``pad_responses_to``, so that a
    sample's loss does not depend on its batch.

    Attributes:
        eps: Smallest mask probability, in (0, 1].
        pad_responses_to: Lengthen responses with EOS tokens to a multiple of this number, at least 1. The EOS tokens
            are masked and scored like other tokens. Set it to the decoders' canvas length, so that the model learns to
            end before the canvas does. ``None``: no lengthening.
        shifted: The hidden state at position i - 1 predicts the mask at position i, as in an autoregressive model
            (Dream, arXiv 2508.15487). The first token of a sample without a prompt is then no target.
        cart_p: Sharpness, in (0, 1], of Dream's context-adaptive token-level weights (CART, arXiv 2508.15487), which
            replace 1 / p: a mask weighs more if more clean tokens are near it. ``None``: 1 / p.

    >>> import torch
    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> corrupted = Masked().corrupt(batch, KeyedNoise(batch.sample_keys), special, mask_ratio=torch.ones(1))
    >>> corrupted.input_ids, corrupted.labels
    (tensor([[5, 2, 2, 2]]), tensor([[-100,    6,    7,    8]]))
    """

    term = "mdm"
    ranges = {"eps": "(0, 1]", "pad_responses_to": 1, "cart_p": "(0, 1]"}
    eps: float = 1e-3
    pad_responses_to: int | None = None
    shifted: bool = False
    cart_p: float | None = None

    @property
    def traits(self) -> ModelTraits:
        """Bidirectional attention; a mask is predicted at its position or, ``shifted``, at the position before."""
        return ModelTraits(attention="bidirectional", predictions=("mask_shifted" if self.shifted else "mask",))

    def trained_canvas(self, response_length: int) -> int:
        """Return the length of the longest response with its padding; see :meth:`Objective.trained_canvas`."""
        multiple = self.pad_responses_to or 1
        return -(-response_length // multiple) * multiple

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
    """Return the positions' weights: p (1 - p)^(distance - 1), summed over clean tokens and halved.

    This is the geometric kernel of CART (Dream, arXiv 2508.15487). Prompt tokens are clean; padding is not.

    Args:
        is_clean: Positions with a token instead of a mask.
        sharpness: p of the geometric distribution, in (0, 1]; 1 counts direct neighbours only.
    """
    positions = torch.arange(is_clean.shape[1], device=is_clean.device)
    distance = (positions[:, None] - positions).abs().double()
    kernel = sharpness * (1 - sharpness) ** (distance - 1).clamp(min=0)
    return 0.5 * is_clean.float() @ kernel.float().masked_fill(distance == 0, 0.0)
