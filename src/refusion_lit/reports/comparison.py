"""Compares rows: intervals, paired differences, the Pareto front, AUP and grids over two options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from refusion_lit.reports.intervals import Bootstrap, Interval, accuracy_under_parallelism, pareto_front
from refusion_lit.reports.runs import Collection, Row, Run, varied_options

_MAX_LISTED_NAMES = 20


@dataclass(kw_only=True)
class MeasuredRow:
    """A row with its intervals.

    Attributes:
        row: The row.
        score: Mean score in percent.
        tokens_per_forward: Total tokens divided by total forwards.
        has_intervals: ``False`` without predictions, where low and high equal the estimate.
        on_front: Whether the row is on the Pareto front.
    """

    row: Row
    score: Interval
    tokens_per_forward: Interval
    has_intervals: bool
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
class Grid:
    """One figure of a method over two swept options; ``values[y][x]`` is ``None`` where the sweep has no point."""

    method: str
    figure: str
    x_name: str
    y_name: str
    x_values: list[str]
    y_values: list[str]
    values: list[list[float | None]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a report shows.

    Attributes:
        collection: The runs and rows.
        bootstrap: Settings of the intervals.
        measured: All rows with their intervals.
        baseline: Name of the baseline.
        differences: Paired differences of the other rows from their baseline.
        aup: AUP and number of points of each method.
        grids: Score and tokens per forward of each method, for sweeps that vary exactly two options.
    """

    collection: Collection
    bootstrap: Bootstrap
    measured: list[MeasuredRow]
    baseline: str
    differences: list[Difference]
    aup: dict[str, tuple[float, int]]
    grids: list[Grid]


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
    measured = [_measure(row, bootstrap) for row in rows]
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
        aup=_aup(measured),
        grids=_grids(measured, collection.runs),
    )


def _measure(row: Row, bootstrap: Bootstrap) -> MeasuredRow:
    scores, speed = _totals(row, list(row.predictions))
    if sum(speed[1]) == 0:
        figures = 100 * float(row.figures["score"]), float(row.figures.get("tokens_per_forward", 0.0))
        intervals = [Interval(estimate=value, low=value, high=value) for value in figures]
        return MeasuredRow(row=row, score=intervals[0], tokens_per_forward=intervals[1], has_intervals=False)
    return MeasuredRow(
        row=row, score=bootstrap.ratio(*scores), tokens_per_forward=bootstrap.ratio(*speed), has_intervals=True
    )


def _totals(row: Row, ids: Sequence[str]) -> tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """Return numerators and denominators, one value per prompt, of the score and of tokens per forward."""
    predictions = [row.predictions[i] for i in ids]
    scores = [100 * p.score for p in predictions], [1.0] * len(ids)
    return scores, ([float(p.num_tokens) for p in predictions], [float(p.num_forwards) for p in predictions])


def _find_baseline(row: Row, rows: Sequence[Row], name: str) -> Row:
    exact = [other for other in rows if other.label == name]
    same_decoder = [other for other in rows if name in (other.decoder, other.method)]
    same_run = [other for other in same_decoder if other.run is row.run]
    found = exact or same_run or same_decoder
    if not found:
        names = list(dict.fromkeys([*(other.decoder for other in rows), *(other.label for other in rows)]))
        num_more = len(names) - _MAX_LISTED_NAMES
        known = ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {num_more} more" if num_more > 0 else "")
        raise ValueError(f"baseline: expected one of {known}; got {name!r}. Choose one of these names.")
    return found[0]


def _difference(row: Row, baseline: Row, bootstrap: Bootstrap) -> Difference:
    shared = [i for i in row.predictions if i in baseline.predictions]
    score = speed = None
    if shared:
        pairs = zip(_totals(row, shared), _totals(baseline, shared), strict=True)
        score, speed = (bootstrap.paired_difference(first, second) for first, second in pairs)
    return Difference(
        row=row,
        baseline=baseline,
        num_shared=len(shared),
        num_only_row=len(row.predictions) - len(shared),
        num_only_baseline=len(baseline.predictions) - len(shared),
        score=score,
        tokens_per_forward=speed,
    )


def _aup(measured: Sequence[MeasuredRow]) -> dict[str, tuple[float, int]]:
    best = max(m.score.estimate for m in measured)
    points: dict[str, list[tuple[float, float]]] = {}
    for m in measured:
        points.setdefault(m.row.method, []).append((m.tokens_per_forward.estimate, m.score.estimate))
    return {method: (accuracy_under_parallelism(values, best), len(values)) for method, values in points.items()}


def _grids(measured: Sequence[MeasuredRow], runs: Sequence[Run]) -> list[Grid]:
    varied = {run.source: varied_options([r for r in runs if r.source == run.source]) for run in runs}
    cells: dict[str, dict[tuple[str, str], list[MeasuredRow]]] = {}
    axes: dict[str, list[str]] = {}
    for m in measured:
        names, options = varied[m.row.run.source], m.row.run.options
        if len(names) != 2 or not options:
            continue
        axes[m.row.method] = names
        y, x = (_text(options.get(name)) for name in names)
        cells.setdefault(m.row.method, {}).setdefault((y, x), []).append(m)
    grids = []
    for method, found in cells.items():
        ys, xs = (sorted({key[axis] for key in found}, key=_numbers_first) for axis in (0, 1))
        for figure in ("score", "tokens_per_forward"):
            values = [[_mean([getattr(m, figure).estimate for m in found.get((y, x), [])]) for x in xs] for y in ys]
            y_name, x_name = axes[method]
            grid = Grid(
                method=method, figure=figure, x_name=x_name, y_name=y_name, x_values=xs, y_values=ys, values=values
            )
            grids.append(grid)
    return grids


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _numbers_first(text: str) -> tuple[int, float, str]:
    """Sort key: numbers by value, then other texts by name."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
