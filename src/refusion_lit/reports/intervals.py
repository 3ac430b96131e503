"""Confidence intervals over prompts: percentile bootstrap, Wilson's and Newcombe's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refusion_lit.utils.require import require

NUM_RESAMPLES = 2000
"""Number of bootstrap resamples, drawn with seed 0. All intervals are 95 % intervals."""
_TAIL = 50 * (1 - 0.95)
"""Percentage beyond each end of an interval."""
_Z = 1.959963984540054
"""Standard normal quantile of ``100 - _TAIL`` percent."""
_MAX_DIGITS = 6
"""Smaller differences are rounding errors."""


class Interval(NamedTuple):
    """A point estimate with its 95 % confidence interval, in the same unit; NaN where nothing is known."""

    estimate: float
    low: float = math.nan
    high: float = math.nan


def format_interval(value: Interval, digits: int, *, signed: bool = False) -> tuple[str, ...]:
    """Return the texts of an estimate and of the known ends of the interval.

    An end gets more digits if it would be rounded to 0, because 0 says that the interval contains 0 or ends there.

    >>> format_interval(Interval(0.4, 0.02, 1.0), 1, signed=True)
    ('+0.40', '+0.02', '+1.00')
    >>> format_interval(Interval(0.4), 1)
    ('0.4',)
    """
    numbers = [round(number, _MAX_DIGITS) for number in value if not math.isnan(number)]
    while any(end and not round(end, digits) for end in numbers[1:]):
        digits += 1
    return tuple(f"{number:{'+' if signed and number else ''}.{digits}f}" for number in numbers)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return a ratio between totals with its interval; if all denominators are 1, the ratio is the mean.

    Args:
        numerators: A value per prompt.
        denominators: A value per prompt, not all 0.
    """
    return bootstrap(_ratio, numerators, denominators)


def ratio_difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Return the first ratio minus the second; resamples draw the same prompts for both.

    Args:
        first: Numerators and denominators, a value per prompt.
        second: The other row's numerators and denominators, with the prompts in the same order.
    """
    return bootstrap(lambda a, b, c, d: _ratio(a, b) - _ratio(c, d), *first, *second)


def score_interval(values: Sequence[float]) -> Interval:
    """Return the mean score in percent, with Wilson's interval if every score is 0 or 100, else the bootstrap's.

    If few prompts are right, or few are wrong, the bootstrap is too narrow; Wilson's interval (1927) is not.

    Args:
        values: A score from 0 to 100 per prompt; not empty.

    >>> [round(value) for value in score_interval([100.0] * 9 + [0.0])]
    [90, 60, 98]
    """
    if set(values) <= {0.0, 100.0}:
        return Interval(*(100 * value for value in wilson(list(values).count(100.0), len(values))))
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

    >>> [round(value, 2) for value in wilson(0, 10)]
    [0.0, 0.0, 0.28]
    """
    require(num_trials >= 1, "num_trials", "at least 1", num_trials, "count trials first")
    require(0 <= num_hits <= num_trials, "num_hits", f"0 to {num_trials}", num_hits, "count hits among the trials")
    share, scale = num_hits / num_trials, 2 * (num_trials + _Z**2)
    centre = (2 * num_trials * share + _Z**2) / scale
    half = _Z / scale * math.sqrt(4 * num_trials * share * (1 - share) + _Z**2)
    # Without rounding, the ends are 0 and 1 exactly where all trials agree.
    return Interval(share, centre - half if num_hits else 0.0, centre + half if num_hits < num_trials else 1.0)


def bootstrap(statistic: Callable[..., NDArray[np.float64]], *columns: Sequence[float]) -> Interval:
    """Return a statistic with its percentile bootstrap interval.

    Args:
        statistic: A function of the columns' totals, which are arrays with a total per resample.
        columns: Columns with a value per prompt; a resample draws the same prompts in all columns.
    """
    data = np.asarray(columns, dtype=np.float64)
    num_prompts = data.shape[1]
    generator = np.random.default_rng(0)
    draws = (generator.integers(num_prompts, size=num_prompts) for _ in range(NUM_RESAMPLES))  # one in memory at a time
    totals = np.stack([data.take(draw, axis=1).sum(axis=1) for draw in draws], axis=1)
    low, high = np.nanpercentile(statistic(*totals), (_TAIL, 100 - _TAIL))
    return Interval(float(statistic(*data.sum(axis=1))), float(low), float(high))


def _ratio(numerators: NDArray[np.float64], denominators: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide totals; NaN where the denominator is 0, as in a resample without forwards."""
    return numerators / np.where(denominators == 0, np.nan, denominators)
