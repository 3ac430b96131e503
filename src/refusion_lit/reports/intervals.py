"""Statistics of a comparison: bootstrap and Wilson intervals, the Pareto front and accuracy under parallelism (AUP)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from refusion_lit.utils.require import require, require_at_least, require_between, require_number

_MAX_DRAWN_COUNTS = 1 << 22
"""Bootstrap counts that are held in memory at a time (32 MB)."""

_AUP_TOLERANCE, _AUP_DECAY = 5.0, 3.0
"""Percentage points that accuracy may fall, and the steepness of its weight; the paper's."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A point estimate with its confidence interval; all three values are in the same unit."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """A percentile bootstrap over prompts.

    Attributes:
        num_resamples: Number of resamples; at least 1.
        seed: Random seed; at least 0. The resampled prompts depend only on the seed, the number of prompts and
            ``num_resamples``.
        level: Coverage of the intervals, in (0, 1); 0.95 gives 95 % intervals.
    """

    num_resamples: int = 2000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        require_at_least("num_resamples", self.num_resamples, 1)
        require_at_least("seed", self.seed, 0)
        require_number("level", self.level, "(0, 1)", "set it to 0.95, for example")

    def ratio(self, numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
        """Return the ratio of the totals over all prompts; with denominators of 1 this is the mean.

        Args:
            numerators: One value per prompt.
            denominators: One value per prompt; at least one must not be 0.
        """
        columns = np.stack([_floats(numerators), _floats(denominators)], axis=1)
        return self._interval(_ratio_of_totals(columns.sum(axis=0)), _ratio_of_totals(self._resampled_totals(columns)))

    def paired_difference(
        self,
        first: tuple[Sequence[float], Sequence[float]],
        second: tuple[Sequence[float], Sequence[float]],
    ) -> Interval:
        """Return the first ratio of totals minus the second; each resample draws the same prompts for both.

        Args:
            first: Numerators and denominators, one value per prompt.
            second: Numerators and denominators of the other row, with the prompts in the same order.
        """
        columns = np.stack([_floats(values) for pair in (first, second) for values in pair], axis=1)
        totals, resampled = columns.sum(axis=0), self._resampled_totals(columns)
        return self._interval(
            _ratio_of_totals(totals[:2]) - _ratio_of_totals(totals[2:]),
            _ratio_of_totals(resampled[:, :2]) - _ratio_of_totals(resampled[:, 2:]),
        )

    def score(self, values: Sequence[float]) -> Interval:
        """Return the mean of scores in percent.

        If all prompts are right, or all are wrong, every resample is the same and the bootstrap's interval has no
        width. The interval is Wilson's (1927) then, which also holds for few prompts.

        Args:
            values: One score from 0 to 100 per prompt; at least one.
        """
        if _at_edge(values):
            return _edge_interval(values, self.level)
        return self.ratio(values, [1.0] * len(values))

    def score_difference(self, first: Sequence[float], second: Sequence[float]) -> Interval:
        """Return the first mean score in percent minus the second, paired by prompt.

        If both means are 0 or 100, the interval is made of the two Wilson intervals (Newcombe 1998, method 10, where
        the correlation is 0 at the edges).

        Args:
            first: One score from 0 to 100 per prompt.
            second: The scores of the other row, with the prompts in the same order.
        """
        ones = [1.0] * len(first)
        if not (_at_edge(first) and _at_edge(second)):
            return self.paired_difference((first, ones), (second, ones))
        a, b = _edge_interval(first, self.level), _edge_interval(second, self.level)
        return Interval(
            estimate=a.estimate - b.estimate,
            low=a.estimate - b.estimate - math.hypot(a.estimate - a.low, b.high - b.estimate),
            high=a.estimate - b.estimate + math.hypot(a.high - a.estimate, b.estimate - b.low),
        )

    def _resampled_totals(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the totals of each column in each resample, [resample, column]."""
        generator = np.random.default_rng(self.seed)
        num_prompts = len(columns)
        # Drawing n prompts with replacement is one multinomial draw of how often each prompt occurs.
        max_size = max(1, _MAX_DRAWN_COUNTS // num_prompts)
        parts = []
        for start in range(0, self.num_resamples, max_size):
            size = min(max_size, self.num_resamples - start)
            counts = generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=size)
            parts.append(counts @ columns)
        return np.concatenate(parts)

    def _interval(self, estimate: NDArray[np.float64], resampled: NDArray[np.float64]) -> Interval:
        tail = 50 * (1 - self.level)
        low, high = np.nanpercentile(resampled, [tail, 100 - tail])
        return Interval(estimate=float(estimate), low=float(low), high=float(high))


def wilson(num_hits: int, num_trials: int, level: float = 0.95) -> Interval:
    """Return the share of hits, from 0 to 1, with Wilson's score interval (1927), which also holds for few trials.

    Args:
        num_hits: Number of hits; from 0 to ``num_trials``.
        num_trials: Number of trials; at least 1.
        level: Coverage of the interval, in (0, 1).
    """
    require_at_least("num_trials", num_trials, 1)
    require_between("num_hits", num_hits, 0, num_trials)
    require_number("level", level, "(0, 1)", "set it to 0.95, for example")
    z, share = NormalDist().inv_cdf((1 + level) / 2), num_hits / num_trials
    scale = 1 + z**2 / num_trials
    middle = (share + z**2 / (2 * num_trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_trials + (z / (2 * num_trials)) ** 2)
    # At the edges one end equals the share exactly; rounding would shift it.
    low, high = 0.0 if num_hits == 0 else middle - half, 1.0 if num_hits == num_trials else middle + half
    return Interval(estimate=share, low=low, high=high)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point dominates.

    A point dominates another if it is at least as good in both coordinates and better in one.

    Args:
        points: Pairs of values to maximise, such as tokens per forward and score.
    """
    return [i for i, (x, y) in enumerate(points) if not any(u >= x and v >= y and (u > x or v > y) for u, v in points)]


def accuracy_under_parallelism(points: Iterable[tuple[float, float]], best: float | None = None) -> float:
    """Return AUP (arXiv 2601.07568): the area under accuracy over tokens per forward, weighted by accuracy kept.

    Each accuracy is multiplied by ``min(exp(-3 * (1 - accuracy / best)), 1)``. Points whose accuracy is more than 5
    percentage points below that of the method's slowest point are dropped. Of several points with the same tokens per
    forward the most accurate one is used.

    Args:
        points: Pairs of tokens per forward and accuracy in percent, of one method.
        best: The best accuracy of any method in the comparison; the best of ``points`` by default.

    Raises:
        ValueError: If there are no points.
    """
    by_speed: dict[float, float] = {}
    for speed, accuracy in points:
        by_speed[speed] = max(accuracy, by_speed.get(speed, accuracy))
    require(bool(by_speed), "points", "at least one pair of tokens per forward and accuracy", [], "add one")
    speeds = sorted(by_speed)
    first = by_speed[speeds[0]]
    best = max(by_speed.values()) if best is None else best
    kept = [(speed, by_speed[speed]) for speed in speeds if by_speed[speed] >= first - _AUP_TOLERANCE]
    weighted = [accuracy * _aup_weight(accuracy, best) for _, accuracy in kept]
    area = kept[0][0] * first
    for i in range(1, len(kept)):
        area += (kept[i][0] - kept[i - 1][0]) * (weighted[i] + weighted[i - 1]) / 2
    return float(area)


def _at_edge(values: Sequence[float]) -> bool:
    """Return whether all scores are 0, or all are 100."""
    return set(values) in ({0.0}, {100.0})


def _edge_interval(values: Sequence[float], level: float) -> Interval:
    """Return Wilson's score interval in percent of scores that are all 0 or all 100."""
    share = wilson(len(values) if values[0] else 0, len(values), level)
    return Interval(estimate=100 * share.estimate, low=100 * share.low, high=100 * share.high)


def _aup_weight(accuracy: float, best: float) -> float:
    return min(float(np.exp(-_AUP_DECAY * (1 - accuracy / best))), 1.0) if best > 0 else 1.0


def _floats(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _ratio_of_totals(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide the first value of the last axis by the second; NaN where the second is 0."""
    numerator, denominator = totals[..., 0], totals[..., 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator == 0, np.nan, np.divide(numerator, denominator))
