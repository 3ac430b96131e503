"""Grouped masking against a slow reference that works on lists, and the laws of its order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid
from refusion_lit.refusion.slot_noise import grouped_slots
from refusion_lit.types import SpecialTokens

GROUPS = ("suffix", "prefix", "middle", "random")


def slow_groups(length: int, wanted: int, span: int, order: tuple[str, ...], keys: list[int]) -> list[int]:
    """Mark slots group by group, as the reference program marks tokens."""
    marked: set[int] = set()
    for group in order:
        free = [slot for slot in range(length) if slot not in marked]
        left = wanted - len(marked)
        run = min(left, span)
        if group == "suffix":
            marked |= set(free[len(free) - run :])
        elif group == "prefix":
            marked |= set(free[:run])
        elif group == "middle" and left > 0:
            num_runs = left // run
            gap = (len(free) - num_runs * run) // (num_runs + 1)
            for number in range(num_runs):
                first = gap + number * (run + gap)
                marked |= set(free[first : first + run])
        elif group == "random":
            marked |= set(sorted(free, key=lambda slot: keys[slot])[:left])
    return sorted(marked)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 24), st.floats(0.001, 1.0), st.integers(1, 9)), min_size=1, max_size=4),
    shuffled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_slow_reference(rows: list[tuple[int, float, int]], shuffled: bool, seed: int) -> None:
    lengths, shares, spans = zip(*rows, strict=True)
    noise = KeyedNoise(torch.arange(len(rows)) + 1000 * seed)
    found = grouped_slots(
        noise,
        30,
        torch.tensor(shares, dtype=torch.double),
        lengths=torch.tensor(lengths),
        span=torch.tensor(spans),
        shuffled=shuffled,
    )
    orders = list(permutations(GROUPS))
    for row, (length, share, span) in enumerate(rows):
        chosen = int(noise.uniform("group_order", 1)[row, 0] * len(orders)) if shuffled else 0
        keys = noise.bits("group_random", 30)[row].tolist()
        wanted = max(math.ceil(share * length - 1e-6), 1)
        expected = slow_groups(length, wanted, span, orders[chosen], keys)
        assert found[row].nonzero()[:, 0].tolist() == expected
        assert len(expected) == wanted


@pytest.mark.parametrize("pattern", ["grouped", "shuffled_groups"])
def test_the_masked_term_is_a_mean_over_masked_tokens(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Callable[..., KeyedNoise],
    special_tokens: SpecialTokens,
    pattern: str,
) -> None:
    batch = make_batch([(3, 17), (0, 5), (2, 30), (4, 1)])
    objective = Hybrid(slot_sizes=(3,), mask_pattern=pattern, max_span=6)
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens)
    assert corrupted.is_masked is not None
    sums = corrupted.weights.where(corrupted.is_masked, 0.0).sum(1)
    assert sums.tolist() == pytest.approx([1.0] * 4)
    assert corrupted.is_masked.any(1).all()


def test_first_groups_are_equally_frequent_when_shuffled(chi_square: Callable[..., float]) -> None:
    num = 8000
    found = grouped_slots(
        KeyedNoise(torch.arange(num)),
        100,
        torch.full((num,), 0.05, dtype=torch.double),
        lengths=torch.full((num,), 100),
        span=torch.full((num,), 8),
        shuffled=True,
    )
    runs = Counter(tuple(row.nonzero()[:, 0].tolist()) for row in found)
    counts = [runs[tuple(range(start, start + 5))] for start in (0, 47, 95)]
    counts.append(num - sum(counts))  # at random: hardly ever one of the runs
    assert chi_square(counts, [num / 4] * 4) < 16.3  # 3 degrees of freedom, p = 0.001


def test_a_group_spans_whole_slots_and_at_least_one(
    make_batch: Callable[..., ResponseBatch], make_noise: Callable[..., KeyedNoise], special_tokens: SpecialTokens
) -> None:
    batch = make_batch([(1, 40)])
    for max_span, expected in ((1, range(33, 41)), (8, range(33, 41)), (17, range(25, 41))):
        corrupted = Hybrid(slot_sizes=(8,), mask_pattern="grouped", max_span=max_span).corrupt(
            batch, make_noise(batch), special_tokens, mask_ratio=torch.tensor([0.2 if max_span < 17 else 0.4])
        )
        assert corrupted.is_masked is not None
        assert corrupted.position_ids[corrupted.is_masked].tolist() == list(expected)


def test_an_impossible_span_is_refused() -> None:
    with pytest.raises(ValueError, match=r"objective\.max_span: expected an integer of at least 1"):
        Hybrid(max_span=0)
