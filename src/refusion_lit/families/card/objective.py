"""Soft-tailed masking on a causal model, as CARD is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import (
    MaskRatio,
    Objective,
    mask_probability,
    random_subset,
    required_mask_id,
    response_positions,
)
from refusion_lit.learning.text_order import shift_left
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least, require_number


@dataclass(frozen=True, kw_only=True)
class SoftTail(Objective):
    """Masks tokens near the end of a response, and predicts every token from those before it, masks or not.

    With t uniform in [0, 1) and R response tokens, N = max(1, floor(R t)) of the last W = min(R, floor(tail N)) tokens
    are masked, drawn uniformly. Attention is causal, and the state at a position predicts the token after it. A target
    n weighs 1 / (beta + S_n), with S_n the sum over earlier inputs i of C_i (1 - decay)^(n - 1 - i), where C_i is 0 for
    a clean token, 1 for a mask, and 2 for a mask after a mask: what follows masks closely is hard to know. The only
    term is ``next_token``.

    Source: CARD (arXiv 2601.22031), after notes and re-implementations of others: neither its paper nor code of its
    authors was at hand. The values of ``tail``, ``beta``, ``decay`` and the denominator, the sum of
    weights, are those of re-implementations. Deliberate difference: the prompt is never masked.

    Attributes:
        tail: Width of the tail in masks (lambda), at least 1; 1 masks the whole tail.
        beta: Weight of a target without masks before it is 1 / beta; above 0.
        decay: How fast masks are forgotten (p), in (0, 1].
    """

    term = "next_token"
    tail: float = 1.5
    beta: float = 1.0
    decay: float = 0.5

    def __post_init__(self) -> None:
        """Refuse options that cannot be trained with."""
        super().__post_init__()
        require_at_least("objective.tail", self.tail, 1.0)
        require_number("objective.beta", self.beta, "(0, inf)", "use 1, say")
        require_number("objective.decay", self.decay, "(0, 1]", "use 0.5, say")

    @property
    def traits(self) -> ModelTraits:
        """Causal attention; every token, mask or not, predicts the next."""
        return ModelTraits(attention="causal", predictions=("mask_shifted", "next_token"))

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask part of the responses' tails; see :meth:`Objective.corrupt`."""
        mask_token_id = required_mask_id(self, special_tokens)
        ratio = mask_probability(noise, 0.0, mask_ratio)
        positions, in_response = response_positions(batch)
        num_masks = (batch.response_lengths * ratio).floor().long().clamp(min=1)
        width = (num_masks * self.tail).floor().long().minimum(batch.response_lengths)
        ends = batch.prompt_lengths + batch.response_lengths
        in_tail = in_response & (positions >= (ends - width)[:, None])
        is_masked = random_subset(noise.bits("token_mask", len(positions)), in_tail, num_masks)

        labels = shift_left(batch.input_ids.where(in_response, IGNORE_INDEX), IGNORE_INDEX)
        weights = (1 / (self.beta + mask_density(is_masked, self.decay))).where(labels != IGNORE_INDEX, 0.0)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, mask_token_id),
            position_ids=positions.expand_as(labels),
            labels=labels,
            weights=weights.float(),
            terms=torch.zeros_like(labels),
            counts=weights.sum()[None].double(),
            is_masked=is_masked,
            is_real=positions < ends[:, None],
        )


def mask_density(is_masked: Bool[Tensor, "batch token"], decay: float) -> Float[Tensor, "batch token"]:
    """Return S of the target after each position, in float64.

    Args:
        is_masked: Positions that hold a mask.
        decay: p; a mask d positions before the last one counts (1 - p)^d.
    """
    masks = is_masked.double()
    density = masks * (1 + F.pad(masks, (1, 0))[:, :-1])
    # S_(n+1) = C_n + (1 - p) S_n, summed over 1, 2, 4, ... positions.
    step = 1
    factor = 1 - decay
    while step < density.shape[1]:
        density = density + factor * F.pad(density, (step, 0))[:, :-step]
        step = 2 * step
        factor = factor * factor
    return density
