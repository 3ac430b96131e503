"""Compares rows: intervals, paired differences and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refusion_lit.reports.intervals import Bootstrap, Interval, pareto_front
from refusion_lit.reports.runs import Collection, Row


@dataclass(kw_only=True)
class MeasuredRow:
    """A row with its intervals.

    Attributes:
        row: The row.
        score: Mean score in percent.
        tokens_per_forward: Total tokens divided by total forwards.
        has_intervals: ``False`` without predictions, where low and high equal the estimate.
        num_prompts: Number of prompts that the score is a mean over.
        num_expected: Number of prompts of the largest test.
        on_front: Whether the row is on the Pareto front.
    """

    row: Row
    score: Interval
    tokens_per_forward: Interval
    has_intervals: bool
    num_prompts: int
    num_expected: int
    on_front: bool = False


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row minus its baseline over the prompts that both have.

    Attributes:
        row: The row.
        baseline: The row that it is compared with.
        num_shared: Number of prompts that both have.
        num_only_row: Number of prompts that only the row has.
        num_only_baseline: Number of prompts that only the baseline has.
        score: Difference of the scores in percentage points; ``None`` without shared prompts.
        tokens_per_forward: Difference of the tokens per forward; ``None`` without shared prompts.
    """

    row: Row
    baseline: Row
    num_shared: int
    num_only_row: int
    num_only_baseline: int
    score: Interval | None
    tokens_per_forward: Interval | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a report shows.

    Attributes:
        collection: The runs and rows.
        bootstrap: Settings of the intervals.
        measured: All rows with their intervals.
        baseline: Name of the baseline.
        differences: Paired differences of the other rows from their baseline.
        option_names: Short names of the swept options of all rows, by their full names.
        metrics: Names of the further metrics of the runs' tasks.
    """

    collection: Collection
    bootstrap: Bootstrap
    measured: list[MeasuredRow]
    baseline: str
    differences: list[Difference]
    option_names: dict[str, str]
    metrics: list[str]


def compare(collection: Collection, baseline: str | None = None, bootstrap: Bootstrap | None = None) -> Comparison:
    """Compare all rows of a collection.

    Args:
        collection: The runs and rows.
        baseline: Name of a row, or of a decoder: then each row is compared with that decoder of its own run. The
            first row by default.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: If no row or decoder has the baseline's name.
    """
    bootstrap = bootstrap or Bootstrap()
    rows = collection.rows
    num_expected = max(max(len(row.predictions), int(row.figures.get("num_prompts", 0))) for row in rows)
    measured = [_measure(row, num_expected, bootstrap) for row in rows]
    for index in pareto_front([(m.tokens_per_forward.estimate, m.score.estimate) for m in measured]):
        measured[index].on_front = True
    baseline = baseline or rows[0].label
    pairs = [(row, _find_baseline(row, rows, baseline)) for row in rows]
    return Comparison(
        collection=collection,
        bootstrap=bootstrap,
        measured=measured,
        baseline=baseline,
        differences=[_difference(row, base, bootstrap) for row, base in pairs if row is not base],
        option_names=_short_names(list(dict.fromkeys(name for row in rows for name in row.options))),
        metrics=list(dict.fromkeys(name for run in collection.runs for name in run.results.get("metrics") or ())),
    )


def _measure(row: Row, num_expected: int, bootstrap: Bootstrap) -> MeasuredRow:
    scores, speed = _values(row, list(row.predictions))
    has_intervals = sum(speed[1]) > 0
    if has_intervals:
        score = bootstrap.score(scores)
        tokens_per_forward = bootstrap.ratio(*speed)
    else:
        figures = 100 * float(row.figures["score"]), float(row.figures.get("tokens_per_forward", 0.0))
        score, tokens_per_forward = (Interval(estimate=value, low=value, high=value) for value in figures)
    return MeasuredRow(
        row=row,
        score=score,
        tokens_per_forward=tokens_per_forward,
        has_intervals=has_intervals,
        num_prompts=len(scores) if has_intervals else int(row.figures.get("num_prompts", num_expected)),
        num_expected=num_expected,
    )


def _values(row: Row, ids: Sequence[str]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Return one value per prompt: the scores in percent, and the tokens and forwards."""
    predictions = [row.predictions[i] for i in ids]
    scores = [100 * p.score for p in predictions]
    return scores, ([float(p.num_tokens) for p in predictions], [float(p.num_forwards) for p in predictions])


def _find_baseline(row: Row, rows: Sequence[Row], name: str) -> Row:
    exact = [other for other in rows if other.label == name]
    same_decoder = [other for other in rows if name in (other.decoder, other.method)]
    same_run = [other for other in same_decoder if other.run is row.run]
    found = exact or same_run or same_decoder
    if not found:
        names = list(dict.fromkeys([*(other.decoder for other in rows), *(other.label for other in rows)]))
        raise ValueError(f"baseline: expected one of {', '.join(names)}; got {name!r}. Choose one of these names.")
    return found[0]


def _difference(row: Row, baseline: Row, bootstrap: Bootstrap) -> Difference:
    shared = [i for i in row.predictions if i in baseline.predictions]
    score = speed = None
    if shared:
        scores, counts = _values(row, shared)
        base_scores, base_counts = _values(baseline, shared)
        score = bootstrap.score_difference(scores, base_scores)
        speed = bootstrap.paired_difference(counts, base_counts)
    return Difference(
        row=row,
        baseline=baseline,
        num_shared=len(shared),
        num_only_row=len(row.predictions) - len(shared),
        num_only_baseline=len(baseline.predictions) - len(shared),
        score=score,
        tokens_per_forward=speed,
    )


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted name, with as many parts before it as tell the names apart."""
    short = {}
    for name in names:
        parts = name.split(".")
        endings = [".".join(parts[-number:]) for number in range(1, len(parts) + 1)]
        others = [f".{other}" for other in names if other != name]
        short[name] = next((e for e in endings if not any(o.endswith(f".{e}") for o in others)), name)
    return short
