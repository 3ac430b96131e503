"""Confidence intervals over prompts, by scipy: percentile bootstrap, Wilson's and Newcombe's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
"""Number of bootstrap resamples, drawn with seed 0. All intervals are 95 % intervals."""
_LEVEL = 0.95
_MAX_DRAWN = 1 << 22
"""Maximum number of drawn prompts in memory (32 MB per column)."""

_MAX_DIGITS = 6
"""Smaller differences are rounding errors."""


@dataclass(frozen=True)
class Interval:
    """A point estimate with its 95 % confidence interval; all three values have the same unit."""

    estimate: float
    low: float
    high: float


def format_interval(value: Interval, digits: int, *, signed: bool = False) -> tuple[str, str, str]:
    """Return the texts of an estimate and the ends of its interval.

    An end gets more digits if it would be rounded to 0, because 0 says that the interval contains 0 or ends there.

    >>> format_interval(Interval(0.4, 0.02, 1.0), 1, signed=True)
    ('+0.40', '+0.02', '+1.00')
    >>> format_interval(Interval(0.4, 0.0, 1.0), 1, signed=True)
    ('+0.4', '0.0', '+1.0')
    """
    numbers = [round(number, _MAX_DIGITS) for number in (value.estimate, value.low, value.high)]
    while any(end and not round(end, digits) for end in numbers[1:]):
        digits += 1
    estimate, low, high = (f"{number:{'+' if signed and number else ''}.{digits}f}" for number in numbers)
    return estimate, low, high


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return a ratio between totals with its interval; if all denominators are 1, the ratio is the mean.

    Args:
        numerators: A value per prompt.
        denominators: A value per prompt, not all 0.
    """
    return _bootstrap(_ratio, numerators, denominators)


def ratio_difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Return the first ratio minus the second; resamples draw the same prompts for both.

    Args:
        first: Numerators and denominators, a value per prompt.
        second: The other row's numerators and denominators, with the prompts in the same order.
    """
    return _bootstrap(lambda a, b, c, d, axis: _ratio(a, b, axis) - _ratio(c, d, axis), *first, *second)


def score_interval(values: Sequence[float]) -> Interval:
    """Return the mean score in percent, with Wilson's interval if every score is 0 or 100, else the bootstrap's.

    The bootstrap is too narrow where few prompts are right or wrong; Wilson's interval (1927) is not.

    Args:
        values: A score from 0 to 100 per prompt; not empty.

    >>> interval = score_interval([100.0] * 9 + [0.0])
    >>> [round(value) for value in (interval.estimate, interval.low, interval.high)]
    [90, 60, 98]
    """
    if set(values) <= {0.0, 100.0}:
        share = wilson(list(values).count(100.0), len(values))
        return Interval(100 * share.estimate, 100 * share.low, 100 * share.high)
    return ratio_interval(values, [1.0] * len(values))


def score_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the first mean score in percent minus the second, paired by prompt.

    Rows with equal scores may still differ on other prompts. Their share is at most Wilson's limit for
    0 hits. If the means are 0 and 100, the two Wilson intervals give the interval (Newcombe
    1998, method 10, where the correlation is 0 at the edges).

    Args:
        first: A score from 0 to 100 per prompt.
        second: The other row's scores, with the prompts in the same order.
    """
    if list(first) == list(second):
        limit = 100 * wilson(0, len(first)).high
        return Interval(0.0, -limit, limit)
    if not all(set(values) in ({0.0}, {100.0}) for values in (first, second)):
        ones = [1.0] * len(first)
        return ratio_difference((first, ones), (second, ones))
    a, b = score_interval(first), score_interval(second)
    difference = a.estimate - b.estimate
    below = math.hypot(a.estimate - a.low, b.high - b.estimate)
    above = math.hypot(a.high - a.estimate, b.estimate - b.low)
    return Interval(difference, difference - below, difference + above)


def wilson(num_hits: int, num_trials: int) -> Interval:
    """Return a share from 0 to 1 with Wilson's score interval (1927), which also holds for few trials.

    Args:
        num_hits: Number of hits; from 0 to ``num_trials``.
        num_trials: Number of trials; at least 1.

    >>> interval = wilson(0, 10)
    >>> [round(value, 2) for value in (interval.estimate, interval.low, interval.high)]
    [0.0, 0.0, 0.28]
    """
    from scipy.stats import binomtest  # takes about a second to import

    limits = binomtest(num_hits, num_trials).proportion_ci(_LEVEL, method="wilson")
    return Interval(num_hits / num_trials, float(limits.low), float(limits.high))


def _bootstrap(statistic: Callable[..., NDArray[np.float64]], *columns: Sequence[float]) -> Interval:
    """Return a statistic with its bootstrap interval; columns have a value per prompt."""
    from scipy.stats import bootstrap  # takes about a second to import

    data = [np.asarray(column, dtype=np.float64) for column in columns]
    estimate = float(statistic(*data, axis=-1))
    if len(data[0]) == 1:  # scipy refuses a single prompt, whose resamples are all the same
        return Interval(estimate, estimate, estimate)
    with warnings.catch_warnings():  # a resample without forwards has no ratio, and is left out below
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        resamples = bootstrap(
            data,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=NUM_RESAMPLES,
            batch=max(1, _MAX_DRAWN // len(data[0])),
            method="percentile",
            rng=np.random.default_rng(0),
        ).bootstrap_distribution
    tail = 50 * (1 - _LEVEL)
    low, high = np.nanpercentile(resamples, [tail, 100 - tail])
    return Interval(estimate, float(low), float(high))


def _ratio(numerators: NDArray[np.float64], denominators: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Divide totals along an axis; NaN where the denominators' total is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        total = denominators.sum(axis=axis)
        return np.where(total == 0, np.nan, numerators.sum(axis=axis) / total)
