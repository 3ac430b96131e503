"""Which slots of a response are masked: independently, or in groups that leave holes of one piece."""

from __future__ import annotations

from itertools import permutations
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.learning.objective import random_subset
from refusion_lit.modeling.transfer import to_device
from refusion_lit.noise import KeyedNoise

MaskPattern = Literal["independent", "grouped", "shuffled_groups"]
"""Laws by which slots are chosen."""

_GROUPS = ("suffix", "prefix", "middle", "random")


def independent_slots(
    noise: KeyedNoise, num_slots: int, mask_probability: Float[Tensor, " batch"]
) -> Bool[Tensor, "batch slot"]:
    """Mask each slot independently; uses the stream ``slot_mask``."""
    return noise.uniform("slot_mask", num_slots) < mask_probability[:, None]


def grouped_slots(
    noise: KeyedNoise,
    num_slots: int,
    mask_probability: Float[Tensor, " batch"],
    *,
    lengths: Int[Tensor, " batch"],
    span: Int[Tensor, " batch"],
    shuffled: bool,
) -> Bool[Tensor, "batch slot"]:
    """Mask ceil(p n) of a row's n slots, group by group.

    The groups are the last ``span`` slots (suffix), the first ones (prefix), spans of that length at equal distances
    (middle), and single slots at random. A group takes only slots that earlier groups left.

    Args:
        noise: Streams ``group_order`` and ``group_random`` are used.
        num_slots: Slots of the longest row.
        mask_probability: Share of a row's slots that are masked, p in (0, 1].
        lengths: Number of slots of each row, n.
        span: Longest run of slots that a group masks in each row, at least 1.
        shuffled: Draw the order of the groups for each row, instead of the order above.
    """
    slots = torch.arange(num_slots, device=lengths.device)
    is_slot = slots < lengths[:, None]
    # The expected number of masks under independent masking, but at least one.
    wanted = (mask_probability * lengths - 1e-6).ceil().clamp(min=1).long().minimum(lengths)
    is_masked, bits = torch.zeros_like(is_slot), noise.bits("group_random", num_slots)
    for group in _group_order(noise, len(lengths), lengths.device, shuffled=shuffled).unbind(1):
        free = is_slot & ~is_masked
        left = wanted - is_masked.sum(1)
        rank, num_free = free.cumsum(1) - 1, free.sum(1)
        run = left.minimum(span)[:, None]
        chosen = torch.stack(
            (
                free & (rank >= num_free[:, None] - run),
                free & (rank < run),
                free & _in_spans(rank, num_free[:, None], left[:, None], run),
                random_subset(bits, free, left),
            )
        )
        is_masked = is_masked | chosen[group, torch.arange(len(group), device=group.device)]
    return is_masked


def _group_order(
    noise: KeyedNoise, num_rows: int, device: torch.device, *, shuffled: bool
) -> Int[Tensor, "batch group"]:
    """Return the groups' numbers in the order in which they are filled."""
    orders = to_device(np.array(list(permutations(range(len(_GROUPS))))), device)
    if not shuffled:
        return orders[:1].expand(num_rows, -1)
    return orders[(noise.uniform("group_order", 1)[:, 0] * len(orders)).long()]


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
    number, offset = (rank - gap) // (length + gap), (rank - gap) % (length + gap)
    return (rank >= gap) & (offset < length) & (number < num_runs) & (left > 0)


def masked_share(
    is_masked: Bool[Tensor, "batch token"], response_lengths: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return the share of each response's tokens that are masked, at least one token's."""
    return is_masked.sum(1).clamp(min=1).double() / response_lengths
