"""Bootstrap intervals and the Pareto front, against closed forms and slow loops."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from refusion_lit.reports.comparison import pareto_front
from refusion_lit.reports.intervals import (
    ratio_difference,
    ratio_interval,
    score_difference,
    score_interval,
    wilson,
)


@pytest.fixture(autouse=True)
def _many_resamples(_few_resamples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refusion_lit.reports.intervals.NUM_RESAMPLES", 3000)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_the_front_has_the_points_that_nothing_dominates(points: list[tuple[int, int]]) -> None:
    front = pareto_front(points)
    assert front
    for i, (x, y) in enumerate(points):
        is_dominated = any((u > x and v >= y) or (u >= x and v > y) for u, v in points)
        assert (i in front) is not is_dominated


def test_the_interval_of_a_mean_is_close_to_the_normal_approximation() -> None:
    scores = [1.0] * 120 + [0.0] * 280
    interval = ratio_interval(scores, [1.0] * 400)
    spread = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert interval.estimate == 0.3
    assert interval.low == pytest.approx(0.3 - spread, abs=0.006)
    assert interval.high == pytest.approx(0.3 + spread, abs=0.006)
    assert interval == ratio_interval(scores, [1.0] * 400)


@pytest.mark.parametrize(("num_hits", "num"), [(0, 1), (1, 1), (1, 2), (253, 300), (0, 5000), (4999, 5000)])
def test_wilsons_interval_of_a_share(num_hits: int, num: int) -> None:
    expected = binomtest(num_hits, num).proportion_ci(0.95, method="wilson")
    interval = wilson(num_hits, num)
    assert interval.estimate == num_hits / num
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1


@pytest.mark.parametrize(
    ("options", "option"),
    [((0, 0), "num_trials"), ((-1, 5), "num_hits"), ((6, 5), "num_hits")],
)
def test_wilsons_interval_refuses_impossible_counts(options: tuple[int, ...], option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}"):
        wilson(*options)


@pytest.mark.parametrize(("num_right", "num"), [(1, 1), (0, 1), (0, 96), (1, 300), (5, 300), (5000, 5000)])
def test_scores_of_0_and_1_have_wilsons_intervals(num_right: int, num: int) -> None:
    expected = binomtest(num_right, num).proportion_ci(0.95, method="wilson")
    interval = score_interval([100.0] * num_right + [0.0] * (num - num_right))
    assert (interval.low, interval.estimate, interval.high) == pytest.approx(
        (100 * expected.low, 100 * num_right / num, 100 * expected.high)
    )


def test_differences_at_the_edges_have_a_width_that_shrinks_with_the_prompts() -> None:
    widths = []
    for num in (2, 20, 200):
        same = score_difference([100.0] * num, [100.0] * num)
        assert (same.estimate, same.low) == (0, -same.high)
        widths.append(same.high)
        apart = score_difference([0.0] * num, [100.0] * num)
        assert -100 == apart.estimate == apart.low < apart.high < 0
    assert widths == sorted(widths, reverse=True)
    # Newcombe (1998), method 10, by hand for two prompts: Wilson's lower limit is 2 / (2 + 1.96 ** 2).
    assert widths[0] == pytest.approx(100 - 100 * 2 / (2 + 1.96**2), abs=0.01)
    mixed = [100.0, 0.0] * 10
    partial = [50.0, *mixed]
    assert score_interval(partial) == ratio_interval(partial, [1.0] * 21)
    same, edge = score_difference(mixed, mixed), score_difference([100.0] * 20, [100.0] * 20)
    assert (same.low, same.high) == (edge.low, edge.high), "equal on 20 prompts, whatever the scores are"


def test_a_ratio_divides_totals_and_resamples_prompts() -> None:
    generator = np.random.default_rng(5)
    tokens, forwards = generator.integers(1, 60, 150).tolist(), generator.integers(1, 9, 150).tolist()
    interval = ratio_interval(tokens, forwards)
    assert interval.estimate == pytest.approx(sum(tokens) / sum(forwards))
    source = random.Random(1)
    ratios = []
    for _ in range(3000):
        drawn = [source.randrange(150) for _ in range(150)]
        ratios.append(sum(tokens[i] for i in drawn) / sum(forwards[i] for i in drawn))
    ratios.sort()
    assert interval.low == pytest.approx(ratios[75], rel=0.02)  # 2.5 % of the resamples are lower
    assert interval.high == pytest.approx(ratios[2925], rel=0.02)


def test_a_paired_difference_resamples_the_same_prompts_for_both() -> None:
    scores = [float(i % 2) for i in range(50)]
    lower = [score - 0.25 for score in scores]
    ones = [1.0] * 50
    difference = ratio_difference((scores, ones), (lower, ones))
    assert [difference.estimate, difference.low, difference.high] == pytest.approx([0.25] * 3)
    assert ratio_interval(scores, ones).low < 0.45  # the unpaired interval is wide


def test_resamples_are_those_of_scipy() -> None:
    columns = np.random.default_rng(3).integers(1, 60, (2, 40)).astype(float)
    expected = bootstrap(
        tuple(columns), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, n_resamples=3000,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    interval = ratio_interval(*columns.tolist())
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_a_single_prompt_and_resamples_without_forwards_have_intervals() -> None:
    alone = ratio_interval([6.0], [2.0])
    assert (alone.low, alone.estimate, alone.high) == (3, 3, 3)
    mostly_empty = ratio_interval([6.0, 0.0, 0.0], [2.0, 0.0, 0.0])
    assert (mostly_empty.low, mostly_empty.estimate, mostly_empty.high) == (3, 3, 3)
