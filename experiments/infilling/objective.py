"""The objective that masks whole spans of slots, which the experiment compares with masks that are independent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, mask_probability, required_mask_id
from refusion_lit.learning.text_order import random_subset
from refusion_lit.noise import KeyedNoise
from refusion_lit.refusion.objective import Hybrid, corrupt_slots, draw_slot_sizes, most_slots
from refusion_lit.types import SpecialTokens


@dataclass(frozen=True, kw_only=True)
class Grouped(Hybrid):
    """:class:`Hybrid` that masks slots in groups (``grouped_noise`` of Zarya, arXiv 2609.19868, there token by token).

    A share p of a response's slots is masked: the last ``max_span`` tokens first, then the first ones, then spans in
    the middle, then single slots. 1/p in the masked term is 1 over the share of tokens that are masked, as that is not
    p on average.

    Attributes:
        max_span: Maximum number of tokens in a group, at least 1; whole slots, at least one.
    """

    ranges = {"max_span": 1}
    max_span: int = 50

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Cut into slots, mask groups of them, move the clean ones forward; see :meth:`Objective.corrupt`."""
        probability = mask_probability(noise, self.eps, mask_ratio)
        slot_sizes = draw_slot_sizes(noise, self.slot_sizes)
        num_own = (batch.response_lengths + slot_sizes - 1) // slot_sizes
        span = (self.max_span // slot_sizes).clamp(min=1)
        num_slots = most_slots(batch, self.slot_sizes)
        slot_is_masked = grouped_slots(noise, num_slots, probability, lengths=num_own, span=span)
        mask_token_id = required_mask_id(self, special_tokens)
        layout = corrupt_slots(batch, noise, slot_is_masked, slot_sizes=slot_sizes, mask_token_id=mask_token_id)
        share = layout.terms.sum(1).clamp(min=1).double() / batch.response_lengths
        return self.targets(layout, mask_probability=share, response_lengths=batch.response_lengths)


def grouped_slots(
    noise: KeyedNoise,
    num_slots: int,
    mask_probability: Float[Tensor, " batch"],
    *,
    lengths: Int[Tensor, " batch"],
    span: Int[Tensor, " batch"],
) -> Bool[Tensor, "batch slot"]:
    """Mask ceil(p n) of a row's n slots, group by group.

    The groups are the last ``span`` slots, the first ones, spans of that length at equal distances, and single slots at
    random. A group takes only slots that earlier groups left.

    Args:
        noise: The stream ``group_random`` is used.
        num_slots: Slots of the longest row.
        mask_probability: Share of a row's slots that are masked, p in (0, 1].
        lengths: Number of slots of each row, n.
        span: Longest run of slots that a group masks in each row, at least 1.
    """
    free = torch.arange(num_slots, device=lengths.device) < lengths[:, None]
    # The expected number of masks under independent masking, but at least one.
    wanted = (mask_probability * lengths - 1e-6).ceil().clamp(min=1).long().minimum(lengths)
    is_masked = torch.zeros_like(free)
    for group in ("suffix", "prefix", "middle", "random"):
        left = (wanted - is_masked.sum(1))[:, None]
        rank = free.cumsum(1) - 1
        num_free = free.sum(1, keepdim=True)
        run = left.minimum(span[:, None])
        if group == "suffix":
            chosen = free & (rank >= num_free - run)
        elif group == "prefix":
            chosen = free & (rank < run)
        elif group == "middle":
            chosen = free & _in_spans(rank, num_free, left, run)
        else:
            chosen = random_subset(noise.bits("group_random", num_slots), free, left[:, 0])
        is_masked = is_masked | chosen
        free = free & ~chosen
    return is_masked


def _in_spans(
    rank: Int[Tensor, "batch slot"],
    num_free: Int[Tensor, "batch 1"],
    left: Int[Tensor, "batch 1"],
    run: Int[Tensor, "batch 1"],
) -> Bool[Tensor, "batch slot"]:
    """Return which free slots lie in floor(left / span) runs with equal gaps before, between and after them.

    Args:
        rank: Number of each slot among the free ones of its row.
        num_free: Free slots.
        left: Slots still to be masked.
        run: Slots of a run: the span, or ``left`` if that is less.
    """
    length = run.clamp(min=1)
    num_runs = left // length
    gap = (num_free - num_runs * length) // (num_runs + 1)
    number = (rank - gap) // (length + gap)
    offset = (rank - gap) % (length + gap)
    return (rank >= gap) & (offset < length) & (number < num_runs) & (left > 0)
