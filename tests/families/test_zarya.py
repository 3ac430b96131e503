"""The objective Zarya: a curriculum of slot sizes, weights by place, and the order of masked slots.

The experiment's objective ``Grouped`` masks groups of neighbouring slots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, permutations

import pytest
import torch
from experiments.infilling.objective import Grouped, grouped_slots
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.families.zarya import harmonic_factor
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Zarya
from refusion_lit.types import SpecialTokens

SIZES, BORDERS = (2, 4, 8, 16, 32, 64), (0.06, 0.2, 0.4, 0.6, 0.8, 1.0)


@pytest.mark.parametrize(
    ("progress", "size"), [(0.0, 2), (0.06, 2), (0.0600001, 4), (0.5, 16), (0.80001, 64), (1.0, 64), (3.0, 64)]
)
def test_the_slot_size_grows_with_the_progress_of_training(progress: float, size: int) -> None:
    """At a border, training still has the smaller size."""
    objective = Zarya(slot_sizes=SIZES, slot_borders=BORDERS, ar_weight=0.3)
    assert objective.at(progress) == Zarya(slot_sizes=(size,), ar_weight=0.3)


def test_without_borders_nothing_changes_over_training() -> None:
    objective = Zarya()
    assert objective.at(0.7) is objective


@pytest.mark.parametrize("borders", [(0.5,), (0.5, 0.4), (0.0, 1.0), (0.5, 1.1), ()])
def test_impossible_borders_are_refused(borders: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"objective\.slot_borders: expected 2 ascending numbers in \(0, 1\]"):
        Zarya(slot_sizes=(2, 4), slot_borders=borders)


def compute_factors(length: int, p: float, eps: float = 0.0) -> list[float]:
    """Return the factors by which the tokens of a slot are weighted; ``p`` is the probability of masking."""
    place = torch.arange(length)[None]
    lengths, probability = torch.full_like(place, length), torch.tensor([p], dtype=torch.float64)
    return harmonic_factor(place, lengths, probability, eps=eps)[0].tolist()


def test_harmonic_weights_fall_from_n_over_p_to_one_over_p() -> None:
    weights = [factor / 0.5 for factor in compute_factors(4, 0.5)]
    assert weights == pytest.approx([4 / 1 / 0.5, 4 / 2 / 0.5, 4 / 3 / 0.5, 4 / 4 / 0.5])
    assert sum(weights) / 4 == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 0.5)


@pytest.mark.parametrize("p", [0.002, 0.3, 1.0])
@pytest.mark.parametrize("length", [2, 7, 64])
def test_harmonic_weights_follow_the_rescaled_probabilities(length: int, p: float) -> None:
    eps = 1e-3
    steps = [(1 - eps) * (((p + j) / length) % 1) + eps for j in range(length)]
    if p < 1 and steps[0] < p:
        low, high = min(steps), max(steps)
        expected = [low + (t - low) * (p - low) / (high - low) for t in steps]
        assert [p / f for f in compute_factors(length, p, eps)] == pytest.approx(expected)
    actual = compute_factors(length, p, eps)
    assert all(a >= b - 1e-12 for a, b in pairwise(actual)), "never less for an earlier token"
    assert actual[-1] == pytest.approx(1)


def test_weights_go_by_the_place_in_the_slot_and_its_own_length(
    make_batch: Callable[..., ResponseBatch], make_noise: Callable[..., KeyedNoise], special_tokens: SpecialTokens
) -> None:
    batch = make_batch([(3, 10), (2, 5)])
    ratios = torch.tensor([0.6, 0.9], dtype=torch.float64)
    plain, weighted = (
        Zarya(slot_sizes=(4,), token_weights=law).corrupt(batch, make_noise(batch), special_tokens, mask_ratio=ratios)
        for law in ("equal", "harmonic")
    )
    assert torch.equal(plain.input_ids, weighted.input_ids)
    assert plain.is_masked is not None
    for row, (prompt, response, ratio) in enumerate([(3, 10, 0.6), (2, 5, 0.9)]):
        for column in range(prompt + response):
            place = int(plain.position_ids[row, column]) - prompt
            expected = float(plain.weights[row, column])
            if plain.is_masked[row, column]:
                start = place // 4 * 4
                expected *= compute_factors(min(4, response - start), ratio, 1e-3)[place - start]
            assert float(weighted.weights[row, column]) == pytest.approx(expected)


def test_masked_slots_come_in_every_order_if_shuffled(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Callable[..., KeyedNoise],
    chi_square: Callable[..., float],
    special_tokens: SpecialTokens,
) -> None:
    batch = make_batch([(1, 8)] * 6000)
    ones = torch.ones(6000)
    shuffled, plain = (
        Zarya(slot_sizes=(3,), shuffle_masked=flag).corrupt(batch, make_noise(batch), special_tokens, mask_ratio=ones)
        for flag in (True, False)
    )
    slots = {0: (1, 2, 3), 1: (4, 5, 6), 2: (7, 8)}
    orders = Counter(map(tuple, shuffled.position_ids[:, 1:].tolist()))
    expected = [sum((slots[number] for number in order), ()) for order in permutations(range(3))]
    assert chi_square([orders[key] for key in expected], [1000] * 6) < 20.5  # 5 degrees of freedom, p = 0.001
    assert torch.equal(plain.position_ids, torch.arange(9).expand(6000, -1))


def mark_slowly(length: int, wanted: int, span: int, keys: list[int]) -> list[int]:
    """Return the masked slots, marked group by group as the reference program marks tokens.

    Args:
        length: Number of slots.
        wanted: Number of slots to mask.
        span: Maximum number of slots in a group.
        keys: A random number for each slot, by which single slots are chosen at the end.
    """
    marked: set[int] = set()
    for group in ("suffix", "prefix", "middle", "random"):
        free = [slot for slot in range(length) if slot not in marked]
        num_left = wanted - len(marked)
        run = min(num_left, span)
        if group == "suffix":
            marked |= set(free[len(free) - run :])
        elif group == "prefix":
            marked |= set(free[:run])
        elif group == "middle" and num_left > 0:
            num_runs = num_left // run
            gap = (len(free) - num_runs * run) // (num_runs + 1)
            for number in range(num_runs):
                first = gap + number * (run + gap)
                marked |= set(free[first : first + run])
        elif group == "random":
            marked |= set(sorted(free, key=lambda slot: keys[slot])[:num_left])
    return sorted(marked)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 24), st.floats(0.001, 1.0), st.integers(1, 9)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_equals_the_slow_reference(rows: list[tuple[int, float, int]], seed: int) -> None:
    lengths, shares, spans = zip(*rows, strict=True)
    noise = KeyedNoise(torch.arange(len(rows)) + 1000 * seed)
    groups = grouped_slots(
        noise,
        30,
        torch.tensor(shares, dtype=torch.double),
        lengths=torch.tensor(lengths),
        span=torch.tensor(spans),
    )
    for row, (length, share, span) in enumerate(rows):
        keys = noise.bits("group_random", 30)[row].tolist()
        wanted = max(math.ceil(share * length - 1e-6), 1)
        expected = mark_slowly(length, wanted, span, keys)
        assert groups[row].nonzero()[:, 0].tolist() == expected
        assert len(expected) == wanted


def test_the_masked_term_is_a_mean_over_masked_tokens(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Callable[..., KeyedNoise],
    special_tokens: SpecialTokens,
) -> None:
    batch = make_batch([(3, 17), (0, 5), (2, 30), (4, 1)])
    objective = Grouped(slot_sizes=(3,), max_span=6)
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens)
    assert corrupted.is_masked is not None
    sums = corrupted.weights.where(corrupted.is_masked, 0.0).sum(1)
    assert sums.tolist() == pytest.approx([1.0] * 4)
    assert corrupted.is_masked.any(1).all()


def test_a_group_spans_whole_slots_and_at_least_one(
    make_batch: Callable[..., ResponseBatch], make_noise: Callable[..., KeyedNoise], special_tokens: SpecialTokens
) -> None:
    batch = make_batch([(1, 40)])  # five slots of eight tokens, of which one or two are masked
    for max_span, ratio, expected in (
        (1, 1 / 5, range(33, 41)),
        (8, 1 / 5, range(33, 41)),
        (17, 2 / 5, range(25, 41)),
    ):
        objective = Grouped(slot_sizes=(8,), max_span=max_span)
        corrupted = objective.corrupt(batch, make_noise(batch), special_tokens, mask_ratio=torch.tensor([ratio]))
        assert corrupted.is_masked is not None
        assert corrupted.position_ids[corrupted.is_masked].tolist() == list(expected)


def test_an_impossible_span_is_refused() -> None:
    with pytest.raises(ValueError, match=r"objective\.max_span: expected an integer of at least 1"):
        Grouped(max_span=0)
