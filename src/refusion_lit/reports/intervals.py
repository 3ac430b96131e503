"""Intervals, fronts and areas: the arithmetic of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 22
"""Weights drawn at a time (32 MB)."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with the ends of its interval, all in the estimate's unit."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """A percentile bootstrap over prompts.

    Attributes:
        num_resamples: Resamples; the ends of an interval are percentiles over them.
        seed: Seeds the drawing. The same seed, number of prompts and resamples draw the same prompts.
        level: Share of the resamples inside the interval.
    """

    num_resamples: int = 2000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        """Check the options."""
        if self.num_resamples < 1:
            raise ValueError(f"num_resamples: expected at least 1, got {self.num_resamples}; set it to 2000, say.")
        if not 0 < self.level < 1:
            raise ValueError(f"level: expected a share between 0 and 1, got {self.level}; set it to 0.95, say.")

    def ratio(self, numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
        """Return the ratio of totals over prompts; a mean where every denominator is 1.

        Args:
            numerators: One number a prompt.
            denominators: One number a prompt, not all of them 0.
        """
        tops, bottoms = _column(numerators), _column(denominators)
        totals = self._totals(np.stack([tops, bottoms], axis=1))
        return self._interval(_divide(tops.sum(), bottoms.sum()), _divide(totals[:, 0], totals[:, 1]))

    def paired(
        self,
        first: tuple[Sequence[float], Sequence[float]],
        second: tuple[Sequence[float], Sequence[float]],
    ) -> Interval:
        """Return the first ratio of totals minus the second, both over the same drawn prompts.

        Args:
            first: Numerators and denominators, one a prompt.
            second: The same of the other, prompts in the same order.
        """
        columns = [_column(values) for pair in (first, second) for values in pair]
        estimate = _divide(columns[0].sum(), columns[1].sum()) - _divide(columns[2].sum(), columns[3].sum())
        totals = self._totals(np.stack(columns, axis=1))
        differences = _divide(totals[:, 0], totals[:, 1]) - _divide(totals[:, 2], totals[:, 3])
        return self._interval(estimate, differences)

    def _totals(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the totals of every column in every resample [resample, column]."""
        generator = np.random.default_rng(self.seed)
        count = len(columns)
        # How often each prompt is drawn in `count` draws with replacement is multinomial.
        step = max(1, _CHUNK // count)
        parts = []
        for start in range(0, self.num_resamples, step):
            size = min(step, self.num_resamples - start)
            parts.append(generator.multinomial(count, np.full(count, 1 / count), size=size) @ columns)
        return np.concatenate(parts)

    def _interval(self, estimate: NDArray[np.float64], resamples: NDArray[np.float64]) -> Interval:
        tail = 50 * (1 - self.level)
        low, high = np.nanpercentile(resamples, [tail, 100 - tail])
        return Interval(estimate=float(estimate), low=float(low), high=float(high))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point matches in both coordinates and beats in one.

    Args:
        points: Pairs of which more is better in both, such as tokens per forward and score.
    """
    return [i for i, (x, y) in enumerate(points) if not any(u >= x and v >= y and (u > x or v > y) for u, v in points)]


def accuracy_under_parallelism(
    points: Iterable[tuple[float, float]], best: float | None = None, *, tolerance: float = 5.0, decay: float = 3.0
) -> float:
    """Return AUP (arXiv 2601.07568): the area under accuracy over tokens per forward, lost accuracy weighing less.

    Where several points have the same tokens per forward, the most accurate of them is taken.

    Args:
        points: Pairs of tokens per forward and accuracy in percent, of one method.
        best: The best accuracy of any method in the comparison; of these points by default.
        tolerance: Points that are more than so many points less accurate than the slowest one are left out.
        decay: How fast the weight falls with the accuracy lost against ``best``.

    Raises:
        ValueError: If there are no points.
    """
    by_speed: dict[float, float] = {}
    for speed, accuracy in points:
        by_speed[speed] = max(accuracy, by_speed.get(speed, accuracy))
    if not by_speed:
        raise ValueError("points: expected at least one pair of tokens per forward and accuracy, got none; add one.")
    speeds = sorted(by_speed)
    first = by_speed[speeds[0]]
    top = max(by_speed.values()) if best is None else best
    kept = [(speed, by_speed[speed]) for speed in speeds if by_speed[speed] >= first - tolerance]
    weighted = [accuracy * _weight(accuracy, top, decay) for _, accuracy in kept]
    area = kept[0][0] * first
    for i in range(1, len(kept)):
        area += (kept[i][0] - kept[i - 1][0]) * (weighted[i] + weighted[i - 1]) / 2
    return float(area)


def _weight(accuracy: float, best: float, decay: float) -> float:
    return min(float(np.exp(-decay * (1 - accuracy / best))), 1.0) if best > 0 else 1.0


def _column(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _divide(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide; not a number where nothing can be said."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom == 0, np.nan, np.divide(top, bottom))
