"""Zarya's changes to ReFusion's objective (arXiv 2609.19868)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, mask_probability, required_mask_id
from refusion_lit.noise import KeyedNoise
from refusion_lit.refusion.objective import Hybrid, corrupt_slots, draw_slot_sizes, most_slots
from refusion_lit.types import SpecialTokens
from refusion_lit.utils.require import is_number, require


@dataclass(frozen=True, kw_only=True)
class Zarya(Hybrid):
    """:class:`Hybrid` with the changes of Zarya (arXiv 2609.19868); by default all are off.

    Zarya's mix of the terms is ``mdm_weight`` = lambda and ``ar_weight`` = 1 - lambda.

    Attributes:
        slot_borders: Curriculum of slot sizes (``slot_step_borders`` of Zarya): the first size is used up to this share
            of all optimizer steps, the second one up to the next border, and so on; beyond the last border, the last
            size. Ascending, in (0, 1], one for each size. Validation draws from all sizes. Zarya has shares of an
            epoch: the same in a run of one epoch. ``None``: sizes are drawn.
        token_weights: Weights of masked tokens in a slot: ``equal`` (the paper) or ``harmonic``, about n times as much
            for the first of n tokens as for the last (``ordered_sampling`` of Zarya).
        shuffle_masked: Put masked slots in random order too (``diffusion_shuffle`` of Zarya), not in text order.
    """

    slot_borders: tuple[float, ...] | None = None
    token_weights: Literal["equal", "harmonic"] = "equal"
    shuffle_masked: bool = False

    def __post_init__(self) -> None:
        """Refuse options that cannot be trained with."""
        super().__post_init__()
        if self.slot_borders is None:
            return
        holds = isinstance(self.slot_borders, Sequence) and len(self.slot_borders) == len(self.slot_sizes)
        borders = (0.0, *self.slot_borders) if holds else ()
        holds = holds and all(is_number(border, Real) for border in borders)
        holds = holds and all(low < high <= 1 for low, high in pairwise(borders))
        expected = f"{len(self.slot_sizes)} ascending numbers in (0, 1], one for each of slot_sizes, or null"
        require(holds, "objective.slot_borders", expected, self.slot_borders, "state where each size ends")

    def at(self, progress: float) -> Zarya:
        """Return the objective with the slot size of the curriculum; see :meth:`Objective.at`."""
        if self.slot_borders is None:
            return self
        size = self.slot_sizes[sum(border < progress for border in self.slot_borders[:-1])]
        return replace(self, slot_sizes=(size,), slot_borders=None)

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Cut into slots, mask some, move the clean ones forward; see :meth:`Objective.corrupt`."""
        probability = mask_probability(noise, self.eps, mask_ratio)
        slot_sizes = draw_slot_sizes(noise, self.slot_sizes)
        num_slots = most_slots(batch, self.slot_sizes)
        slot_is_masked = noise.uniform("slot_mask", num_slots) < probability[:, None]
        layout = corrupt_slots(
            batch,
            noise,
            slot_is_masked,
            slot_sizes=slot_sizes,
            mask_token_id=required_mask_id(self, special_tokens),
            masked_order=noise.bits("masked_order", num_slots) if self.shuffle_masked else None,
        )
        corrupted = self.targets(layout, mask_probability=probability, response_lengths=batch.response_lengths)
        if self.token_weights == "equal":
            return corrupted
        offset = (layout.position_ids - batch.prompt_lengths[:, None]).clamp(min=0)
        place = offset % slot_sizes[:, None]
        length = slot_sizes[:, None].minimum(batch.response_lengths[:, None] - offset + place).clamp(min=1)
        factor = harmonic_factor(place, length, probability, eps=self.eps)
        weights = torch.where(layout.terms == 1, corrupted.weights * factor, corrupted.weights)
        return replace(corrupted, weights=weights.float())


def harmonic_factor(
    place: Int[Tensor, "batch token"],
    length: Int[Tensor, "batch token"],
    mask_probability: Float[Tensor, " batch"],
    *,
    eps: float,
) -> Float[Tensor, "batch token"]:
    """Return p / q_j, where q_j grows linearly from about p / n at the slot's first token to p at its last one.

    Times 1 / p, the weights of a slot add up to H_n = 1 + 1/2 + ... + 1/n times as much as equal ones.

    Args:
        place: Place of each token in its slot, j from 0.
        length: Tokens of its slot, n.
        mask_probability: p of each row.
        eps: Smallest mask probability.
    """
    p = mask_probability.double()[:, None]
    # For the least probabilities the first one would exceed the last.
    first = (eps + (1 - eps) * p / length).minimum(p)
    alone = (eps + (1 - eps) * p + p) / 2
    own = torch.where(length == 1, alone, first + (p - first) * place / (length - 1).clamp(min=1))
    return p / own
