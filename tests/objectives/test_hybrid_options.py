"""Zarya's options of the hybrid objective: curriculum of slot sizes, weights by place, order of masked slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, permutations

import pytest
import torch

from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid
from refusion_lit.refusion.slot_weights import place_weights
from refusion_lit.types import SpecialTokens

SIZES, BORDERS = (2, 4, 8, 16, 32, 64), (0.06, 0.2, 0.4, 0.6, 0.8, 1.0)


@pytest.mark.parametrize(
    ("progress", "size"), [(0.0, 2), (0.06, 2), (0.0600001, 4), (0.5, 16), (0.80001, 64), (1.0, 64), (3.0, 64)]
)
def test_a_border_belongs_to_the_size_before_it(progress: float, size: int) -> None:
    objective = Hybrid(slot_sizes=SIZES, slot_borders=BORDERS, ar_weight=0.3)
    assert objective.at(progress) == Hybrid(slot_sizes=(size,), ar_weight=0.3)


def test_without_borders_nothing_changes_over_training() -> None:
    objective = Hybrid()
    assert objective.at(0.7) is objective


@pytest.mark.parametrize("borders", [(0.5,), (0.5, 0.4), (0.0, 1.0), (0.5, 1.1), ()])
def test_impossible_borders_are_refused(borders: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"objective\.slot_borders: expected 2 ascending numbers in \(0, 1\]"):
        Hybrid(slot_sizes=(2, 4), slot_borders=borders)


def factors(law: str, length: int, p: float, eps: float = 0.0) -> list[float]:
    """Return the factors of a slot's tokens."""
    place = torch.arange(length)[None]
    lengths, probability = torch.full_like(place, length), torch.tensor([p], dtype=torch.float64)
    return place_weights(law, place, lengths, probability, eps=eps, max_length=64)[0].tolist()  # type: ignore[arg-type]


def test_harmonic_weights_fall_from_n_over_p_to_one_over_p() -> None:
    weights = [factor / 0.5 for factor in factors("harmonic", 4, 0.5)]
    assert weights == pytest.approx([8, 4, 8 / 3, 2])
    assert sum(weights) / 4 == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 0.5)


@pytest.mark.parametrize("p", [0.002, 0.3, 1.0])
@pytest.mark.parametrize("length", [2, 7, 64])
def test_harmonic_weights_follow_the_rescaled_probabilities(length: int, p: float) -> None:
    eps = 1e-3
    steps = [(1 - eps) * (((p + j) / length) % 1) + eps for j in range(length)]
    if p < 1 and steps[0] < p:
        low, high = min(steps), max(steps)
        expected = [low + (t - low) * (p - low) / (high - low) for t in steps]
        assert [p / f for f in factors("harmonic", length, p, eps)] == pytest.approx(expected)
    found = factors("harmonic", length, p, eps)
    assert all(a >= b - 1e-12 for a, b in pairwise(found)), "never less for an earlier token"
    assert found[-1] == pytest.approx(1)


@pytest.mark.parametrize("length", [1, 2, 5, 33, 64])
def test_normalised_weights_have_a_mean_of_one(length: int) -> None:
    found = factors("harmonic_normalised", length, 0.4)
    assert sum(found) / length == pytest.approx(1)
    assert [value / found[-1] for value in found] == pytest.approx([length / (j + 1) for j in range(length)])
    assert factors("equal", length, 0.4) == [1.0] * length


def test_weights_go_by_the_place_in_the_slot_and_its_own_length(
    make_batch: Callable[..., ResponseBatch], make_noise: Callable[..., KeyedNoise], special_tokens: SpecialTokens
) -> None:
    batch = make_batch([(3, 10), (2, 5)])
    ratio = torch.tensor([0.6, 0.9], dtype=torch.float64)
    plain, weighted = (
        Hybrid(slot_sizes=(4,), token_weights=law).corrupt(batch, make_noise(batch), special_tokens, mask_ratio=ratio)
        for law in ("equal", "harmonic_normalised")
    )
    assert torch.equal(plain.input_ids, weighted.input_ids)
    assert plain.is_masked is not None
    for row, (prompt, response) in enumerate([(3, 10), (2, 5)]):
        for column in range(prompt + response):
            place = int(plain.position_ids[row, column]) - prompt
            expected = float(plain.weights[row, column])
            if plain.is_masked[row, column]:
                start = place // 4 * 4
                expected *= factors("harmonic_normalised", min(4, response - start), 0.6)[place - start]
            assert float(weighted.weights[row, column]) == pytest.approx(expected)
    assert weighted.weights.sum().item() == pytest.approx(plain.weights.sum().item(), rel=1e-5)


def test_masked_slots_come_in_every_order_if_shuffled(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Callable[..., KeyedNoise],
    chi_square: Callable[..., float],
    special_tokens: SpecialTokens,
) -> None:
    batch = make_batch([(1, 8)] * 6000)
    ones = torch.ones(6000)
    shuffled, plain = (
        Hybrid(slot_sizes=(3,), shuffle_masked=flag).corrupt(batch, make_noise(batch), special_tokens, mask_ratio=ones)
        for flag in (True, False)
    )
    slots = {0: (1, 2, 3), 1: (4, 5, 6), 2: (7, 8)}
    orders = Counter(map(tuple, shuffled.position_ids[:, 1:].tolist()))
    expected = [sum((slots[number] for number in order), ()) for order in permutations(range(3))]
    assert chi_square([orders[key] for key in expected], [1000] * 6) < 20.5  # 5 degrees of freedom, p = 0.001
    assert torch.equal(plain.position_ids, torch.arange(9).expand(6000, -1))
