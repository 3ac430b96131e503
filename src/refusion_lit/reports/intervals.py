"""Statistics of a comparison: bootstrap and Wilson intervals (scipy's), and the Pareto front."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refusion_lit.utils.require import require_at_least, require_between, require_number

_MAX_DRAWN = 1 << 22
"""Drawn prompts that are held in memory at a time (32 MB for each column of values)."""


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
        return self._interval(_ratio, numerators, denominators)

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
        return self._interval(lambda a, b, c, d, axis: _ratio(a, b, axis) - _ratio(c, d, axis), *first, *second)

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
        a = _edge_interval(first, self.level)
        b = _edge_interval(second, self.level)
        return Interval(
            estimate=a.estimate - b.estimate,
            low=a.estimate - b.estimate - math.hypot(a.estimate - a.low, b.high - b.estimate),
            high=a.estimate - b.estimate + math.hypot(a.high - a.estimate, b.estimate - b.low),
        )

    def _interval(self, statistic: Callable[..., NDArray[np.float64]], *columns: Sequence[float]) -> Interval:
        """Return a statistic of columns of values, one value per prompt, with its interval."""
        from scipy.stats import bootstrap  # takes about a second to import, so only where a report is made

        data = [np.asarray(column, dtype=np.float64) for column in columns]
        estimate = float(statistic(*data, axis=-1))
        if len(data[0]) == 1:  # scipy refuses a single prompt, whose resamples are all the same
            return Interval(estimate=estimate, low=estimate, high=estimate)
        with warnings.catch_warnings():  # a resample without forwards has no ratio, and is left out below
            warnings.filterwarnings("ignore", category=RuntimeWarning)
            resampled = bootstrap(
                data,
                statistic,
                paired=True,
                vectorized=True,
                n_resamples=self.num_resamples,
                batch=max(1, _MAX_DRAWN // len(data[0])),
                method="percentile",
                rng=np.random.default_rng(self.seed),
            ).bootstrap_distribution
        tail = 50 * (1 - self.level)
        low, high = np.nanpercentile(resampled, [tail, 100 - tail])
        return Interval(estimate=estimate, low=float(low), high=float(high))


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
    from scipy.stats import binomtest  # takes about a second to import

    found = binomtest(num_hits, num_trials).proportion_ci(level, method="wilson")
    return Interval(estimate=num_hits / num_trials, low=float(found.low), high=float(found.high))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point dominates.

    A point dominates another if it is at least as good in both coordinates and better in one.

    Args:
        points: Pairs of values to maximise, such as tokens per forward and score.
    """
    return [i for i, (x, y) in enumerate(points) if not any(u >= x and v >= y and (u > x or v > y) for u, v in points)]


def _at_edge(values: Sequence[float]) -> bool:
    """Return whether all scores are 0, or all are 100."""
    return set(values) in ({0.0}, {100.0})


def _edge_interval(values: Sequence[float], level: float) -> Interval:
    """Return Wilson's score interval in percent of scores that are all 0 or all 100."""
    share = wilson(len(values) if values[0] else 0, len(values), level)
    return Interval(estimate=100 * share.estimate, low=100 * share.low, high=100 * share.high)


def _ratio(numerators: NDArray[np.float64], denominators: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the ratio of totals along an axis; NaN where the denominators' total is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        total = denominators.sum(axis=axis)
        return np.where(total == 0, np.nan, numerators.sum(axis=axis) / total)
