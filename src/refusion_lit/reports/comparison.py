"""Compares rows: bootstrap and Wilson intervals (scipy's), paired differences and the Pareto front."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refusion_lit.reports.results import short, with_class
from refusion_lit.reports.runs import Run, ScoredPrediction

NUM_RESAMPLES = 2000
"""Resamples of the percentile bootstrap over prompts, which are drawn with seed 0. All intervals are of 95 %."""
_LEVEL = 0.95
_MAX_DRAWN = 1 << 22
"""Drawn prompts that are held in memory at a time (32 MB for each column of values)."""


@dataclass(frozen=True)
class Interval:
    """A point estimate with its 95 % confidence interval; all three values are in the same unit."""

    estimate: float
    low: float
    high: float


@dataclass(kw_only=True)
class ComparisonRow:
    """One decoder of one run: a row of the comparison.

    Attributes:
        name: Name of the row without its options.
        decoder: The decoder's name in the config.
        method: Rows with the same method form one trade-off curve.
        run: The run that measured the decoder.
        options: Values of the options that the row's sweep varies, as texts by their full names; empty outside a sweep.
        figures: Aggregate figures of the test; see :class:`~refusion_lit.metrics.DecodingMetrics`.
        mismatches: Why the model was not trained for this decoder; empty if it was.
        predictions: Predictions by prompt id; empty if the run has no predictions file.
        on_front: Whether the row is on the Pareto front.
    """

    name: str
    decoder: str
    method: str
    run: Run
    options: dict[str, str]
    figures: dict[str, Any]
    mismatches: list[str]
    predictions: dict[str, ScoredPrediction]
    on_front: bool = False

    @property
    def label(self) -> str:
        """Unique name of the row in the report."""
        options = ", ".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name

    @property
    def title(self) -> str:
        """The row's name and, if that is another word, the class of its decoder."""
        options = self.run.results["decoders"].get(self.decoder) or {}
        shown = with_class(self.decoder, options.get("class"))
        return self.name + shown.removeprefix(self.decoder)

    @property
    def has_intervals(self) -> bool:
        """``False`` without predictions, where low and high equal the estimate."""
        return any(prediction.num_forwards for prediction in self.predictions.values())

    @property
    def num_prompts(self) -> int:
        """Number of prompts that the score is a mean over; 0 if it is unknown."""
        return len(self.predictions) if self.has_intervals else int(self.figures.get("num_prompts", 0))

    @cached_property
    def score(self) -> Interval:
        """Mean score in percent."""
        value = 100 * float(self.figures["score"])
        is_known = self.has_intervals
        return score_interval(_scores(self.predictions.values())) if is_known else Interval(value, value, value)

    @cached_property
    def tokens_per_forward(self) -> Interval:
        """Total tokens divided by total forwards."""
        value = float(self.figures.get("tokens_per_forward", 0.0))
        is_known = self.has_intervals
        return ratio_interval(*_counts(self.predictions.values())) if is_known else Interval(value, value, value)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row minus its baseline over the prompts that both have, by id, with the same text and reference.

    Attributes:
        row: The row.
        baseline: The row that it is compared with.
        num_shared: Number of prompts that both have.
        num_differing: Number of ids that both have, but with another prompt or reference.
        num_only_row: Number of prompts that only the row has.
        num_only_baseline: Number of prompts that only the baseline has.
        score: Difference of the scores in percentage points; ``None`` without shared prompts.
        tokens_per_forward: Difference of the tokens per forward; ``None`` without shared prompts.
    """

    row: ComparisonRow
    baseline: ComparisonRow
    num_shared: int
    num_differing: int
    num_only_row: int
    num_only_baseline: int
    score: Interval | None
    tokens_per_forward: Interval | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a report shows.

    Attributes:
        runs: The runs.
        rows: The decoders of all runs.
        notes: Remarks for the reader.
        baseline: Name of the baseline.
        differences: Paired differences of the other rows from their baseline.
        option_names: Short names of the swept options of all rows, by their full names.
        metrics: Names of the further metrics of the runs' tasks.
    """

    runs: list[Run]
    rows: list[ComparisonRow]
    notes: list[str]
    baseline: str
    differences: list[Difference]
    option_names: dict[str, str]
    metrics: list[str]

    def prompts_of(self, row: ComparisonRow) -> str:
        """Return the number of a row's prompts, and of how many if the largest test had more."""
        most = max(max(len(each.predictions), int(each.figures.get("num_prompts", 0))) for each in self.rows)
        return f"{row.num_prompts or 'unknown'}" + (f" of {most}" if 0 < row.num_prompts < most else "")


def compare(runs: list[Run], notes: list[str], baseline: str | None = None) -> Comparison:
    """Compare all decoders of some runs.

    Args:
        runs: The runs.
        notes: Remarks for the reader.
        baseline: Name of a row, of a decoder (then each row is compared with that decoder of its own run), or of an
            argument (then with its decoder of the same name). The first row by default.

    Raises:
        ValueError: If no row, decoder or argument has the baseline's name.
    """
    rows = _rows(runs)
    for index in pareto_front([(row.tokens_per_forward.estimate, row.score.estimate) for row in rows]):
        rows[index].on_front = True
    baseline = baseline or rows[0].label
    pairs = [(row, _find_baseline(row, rows, baseline)) for row in rows]
    return Comparison(
        runs=runs,
        rows=rows,
        notes=notes,
        baseline=baseline,
        differences=[_difference(row, base) for row, base in pairs if row is not base],
        option_names=short_names(list(dict.fromkeys(name for row in rows for name in row.options))),
        metrics=list(dict.fromkeys(name for run in runs for name in run.results["metrics"])),
    )


def _rows(runs: Sequence[Run]) -> list[ComparisonRow]:
    """Return a row for each decoder of each run; rows with the same label get the run's name."""
    varied = {run.source: _varied_options([r for r in runs if r.source == run.source]) for run in runs}
    rows = []
    for run in runs:
        names = varied[run.source] if run.options else []
        options = {name: short(run.options.get(name)) for name in names}
        for decoder, figures in run.results["results"].items():
            method = f"{run.source}: {decoder}" if len(varied) > 1 else decoder
            rows.append(ComparisonRow(
                name=method, decoder=decoder, method=method, run=run, options=options, figures=figures,
                mismatches=list(run.results["mismatches"].get(decoder) or []),
                predictions=run.predictions[decoder],
            ))  # fmt: skip
    labels = [row.label for row in rows]
    for row, label in zip(rows, labels, strict=True):
        if labels.count(label) > 1:
            row.name += f" [{row.run.name}]"
    return rows


def _varied_options(runs: Sequence[Run]) -> list[str]:
    """Return the names of the options that differ between the points of a sweep."""
    runs = [run for run in runs if run.options]
    names = dict.fromkeys(name for run in runs for name in run.options)
    return [name for name in names if len({json.dumps(run.options.get(name), default=str) for run in runs}) > 1]


def _scores(predictions: Iterable[ScoredPrediction]) -> list[float]:
    """Return the score of each prompt in percent."""
    return [100 * prediction.score for prediction in predictions]


def _counts(predictions: Collection[ScoredPrediction]) -> tuple[list[float], list[float]]:
    """Return the tokens and the forwards of each prompt."""
    return [float(p.num_tokens) for p in predictions], [float(p.num_forwards) for p in predictions]


def _find_baseline(row: ComparisonRow, rows: Sequence[ComparisonRow], name: str) -> ComparisonRow:
    exact = [other for other in rows if other.label == name]
    same_decoder = [other for other in rows if name in (other.decoder, other.method)]
    same_run = [other for other in same_decoder if other.run is row.run]
    same_source = [other for other in rows if f"/{name.rstrip('/')}".endswith(f"/{other.run.source}")]
    same_source.sort(key=lambda other: other.decoder != row.decoder)
    found = exact or same_run or same_decoder or same_source
    if not found:
        names = list(dict.fromkeys([*(other.decoder for other in rows), *(other.label for other in rows)]))
        raise ValueError(f"baseline: expected one of {', '.join(names)}; got {name!r}. Choose one of these names.")
    return found[0]


def _difference(row: ComparisonRow, baseline: ComparisonRow) -> Difference:
    common = [i for i in row.predictions if i in baseline.predictions]
    shared = [i for i in common if row.predictions[i].example == baseline.predictions[i].example]
    first, second = ([each.predictions[i] for i in shared] for each in (row, baseline))
    return Difference(
        row=row,
        baseline=baseline,
        num_shared=len(shared),
        num_differing=len(common) - len(shared),
        num_only_row=len(row.predictions) - len(common),
        num_only_baseline=len(baseline.predictions) - len(common),
        score=score_difference(_scores(first), _scores(second)) if shared else None,
        tokens_per_forward=ratio_difference(_counts(first), _counts(second)) if shared else None,
    )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted name, with as many parts before it as tell the names apart."""
    short = {}
    for name in names:
        parts = name.split(".")
        endings = [".".join(parts[-number:]) for number in range(1, len(parts) + 1)]
        others = [f".{other}" for other in names if other != name]
        short[name] = next((e for e in endings if not any(o.endswith(f".{e}") for o in others)), name)
    return short


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return the ratio of the totals over all prompts; with denominators of 1 this is the mean.

    Args:
        numerators: One value per prompt.
        denominators: One value per prompt; at least one must not be 0.
    """
    return _bootstrapped(_ratio, numerators, denominators)


def ratio_difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Return the first ratio of totals minus the second; each resample draws the same prompts for both.

    Args:
        first: Numerators and denominators, one value per prompt.
        second: Numerators and denominators of the other row, with the prompts in the same order.
    """
    return _bootstrapped(lambda a, b, c, d, axis: _ratio(a, b, axis) - _ratio(c, d, axis), *first, *second)


def score_interval(values: Sequence[float]) -> Interval:
    """Return the mean of scores in percent.

    If all prompts are right, or all are wrong, every resample is the same and the bootstrap's interval has no width.
    The interval is Wilson's (1927) then, which also holds for few prompts.

    Args:
        values: One score from 0 to 100 per prompt; at least one.
    """
    return _edge_interval(values) or ratio_interval(values, [1.0] * len(values))


def score_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the first mean score in percent minus the second, paired by prompt.

    If all scores are equal, prompts that differ may still exist: their share is at most the limit of Wilson's interval.
    If one mean is 0 and the other 100, the interval is made of the two Wilson intervals (Newcombe 1998, method 10,
    where the correlation is 0 at the edges).

    Args:
        first: One score from 0 to 100 per prompt.
        second: The scores of the other row, with the prompts in the same order.
    """
    if list(first) == list(second):
        limit = 100 * wilson(0, len(first)).high
        return Interval(0.0, -limit, limit)
    a, b = _edge_interval(first), _edge_interval(second)
    if a is None or b is None:
        ones = [1.0] * len(first)
        return ratio_difference((first, ones), (second, ones))
    difference = a.estimate - b.estimate
    below = math.hypot(a.estimate - a.low, b.high - b.estimate)
    above = math.hypot(a.high - a.estimate, b.estimate - b.low)
    return Interval(difference, difference - below, difference + above)


def _bootstrapped(statistic: Callable[..., NDArray[np.float64]], *columns: Sequence[float]) -> Interval:
    """Return a statistic of columns of values, one value per prompt, with its interval."""
    from scipy.stats import bootstrap  # takes about a second to import, so only where a report is made

    data = [np.asarray(column, dtype=np.float64) for column in columns]
    estimate = float(statistic(*data, axis=-1))
    if len(data[0]) == 1:  # scipy refuses a single prompt, whose resamples are all the same
        return Interval(estimate, estimate, estimate)
    with warnings.catch_warnings():  # a resample without forwards has no ratio, and is left out below
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        resampled = bootstrap(
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
    low, high = np.nanpercentile(resampled, [tail, 100 - tail])
    return Interval(estimate, float(low), float(high))


def wilson(num_hits: int, num_trials: int) -> Interval:
    """Return the share of hits, from 0 to 1, with Wilson's score interval (1927), which also holds for few trials.

    Args:
        num_hits: Number of hits; from 0 to ``num_trials``.
        num_trials: Number of trials; at least 1.
    """
    from scipy.stats import binomtest  # takes about a second to import

    found = binomtest(num_hits, num_trials).proportion_ci(_LEVEL, method="wilson")
    return Interval(num_hits / num_trials, float(found.low), float(found.high))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point dominates.

    A point dominates another if it is at least as good in both coordinates and better in one.

    Args:
        points: Pairs of values to maximise, such as tokens per forward and score.
    """
    return [i for i, (x, y) in enumerate(points) if not any(u >= x and v >= y and (u > x or v > y) for u, v in points)]


def _edge_interval(values: Sequence[float]) -> Interval | None:
    """Return Wilson's score interval in percent if all scores are 0 or all are 100, else ``None``."""
    if set(values) not in ({0.0}, {100.0}):
        return None
    share = wilson(len(values) if values[0] else 0, len(values))
    return Interval(100 * share.estimate, 100 * share.low, 100 * share.high)


def _ratio(numerators: NDArray[np.float64], denominators: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the ratio of totals along an axis; NaN where the denominators' total is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        total = denominators.sum(axis=axis)
        return np.where(total == 0, np.nan, numerators.sum(axis=axis) / total)
