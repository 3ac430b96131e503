"""Turns rows into a comparison: intervals, paired differences, front, AUP and grids of two options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from refusion_lit.reports.intervals import Interval, Resampling, accuracy_under_parallelism, pareto_front
from refusion_lit.reports.runs import Collection, Row, varied_options


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row with its intervals.

    Attributes:
        row: The row.
        score: Mean score in percent.
        tokens_per_forward: Ratio of totals.
        has_intervals: Whether there were predictions to take intervals from.
        on_front: Whether no other row is at least as good in both and better in one.
    """

    row: Row
    score: Interval
    tokens_per_forward: Interval
    has_intervals: bool
    on_front: bool


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row minus its baseline over the prompts that both have.

    Attributes:
        row: The row.
        baseline: What it is compared with.
        num_shared: Prompts that both have.
        num_only_row: Prompts that only the row has.
        num_only_baseline: Prompts that only the baseline has.
        score: Difference of scores in percentage points; ``None`` without shared prompts.
        tokens_per_forward: Difference of tokens per forward; ``None`` without shared prompts.
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
    """One figure of one method over two options; ``values[y][x]`` is ``None`` where no point is."""

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
        collection: What was read.
        resampling: How intervals were taken.
        measured: Rows with intervals.
        baseline: The baseline's name.
        differences: Paired differences of all other rows.
        areas: AUP and number of points of each method.
        grids: Two figures of each method where exactly two options vary.
    """

    collection: Collection
    resampling: Resampling
    measured: list[Measured]
    baseline: str
    differences: list[Difference]
    areas: dict[str, tuple[float, int]]
    grids: list[Grid]


def compare(collection: Collection, baseline: str | None = None, resampling: Resampling | None = None) -> Comparison:
    """Compare all rows.

    Args:
        collection: What was read.
        baseline: A row's name, or a decoder's: then each run's rows are compared with its own such decoder.
            The first row by default.
        resampling: How intervals are taken.

    Raises:
        ValueError: If there is no such baseline.
    """
    resampling = resampling or Resampling()
    rows = collection.rows
    measured = [_measure(row, resampling) for row in rows]
    front = set(pareto_front([(m.tokens_per_forward.estimate, m.score.estimate) for m in measured]))
    measured = [
        Measured(row=m.row, score=m.score, tokens_per_forward=m.tokens_per_forward, has_intervals=m.has_intervals,
                 on_front=i in front)
        for i, m in enumerate(measured)
    ]  # fmt: skip
    name = baseline or rows[0].label
    pairs = [(row, _baseline_of(row, rows, name)) for row in rows]
    return Comparison(
        collection=collection,
        resampling=resampling,
        measured=measured,
        baseline=name,
        differences=[_difference(row, base, resampling) for row, base in pairs if row is not base],
        areas=_areas(measured),
        grids=_grids(measured, collection),
    )


def _measure(row: Row, resampling: Resampling) -> Measured:
    predictions = list(row.predictions.values())
    if sum(p.num_forwards for p in predictions) == 0:
        score, speed = 100 * float(row.figures["score"]), float(row.figures.get("tokens_per_forward", 0.0))
        return Measured(
            row=row,
            score=Interval(estimate=score, low=score, high=score),
            tokens_per_forward=Interval(estimate=speed, low=speed, high=speed),
            has_intervals=False,
            on_front=False,
        )
    scores, ones, tokens, forwards = _columns(row, list(row.predictions))
    return Measured(
        row=row,
        score=resampling.ratio(scores, ones),
        tokens_per_forward=resampling.ratio(tokens, forwards),
        has_intervals=True,
        on_front=False,
    )


def _columns(row: Row, ids: Sequence[str]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return scores in percent, ones, committed tokens and forwards of some prompts."""
    chosen = [row.predictions[i] for i in ids]
    scores = [100 * p.score for p in chosen]
    return scores, [1.0] * len(ids), [float(p.num_tokens) for p in chosen], [float(p.num_forwards) for p in chosen]


def _baseline_of(row: Row, rows: Sequence[Row], name: str) -> Row:
    exact = [other for other in rows if other.label == name]
    if exact:
        return exact[0]
    named = [other for other in rows if name in (other.decoder, other.method)]
    if not named:
        names = list(dict.fromkeys([*(other.decoder for other in rows), *(other.label for other in rows)]))
        known = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        raise ValueError(f"baseline: expected one of {known}; got {name!r}. Name one of them.")
    own = [other for other in named if other.run is row.run]
    return (own or named)[0]


def _difference(row: Row, baseline: Row, resampling: Resampling) -> Difference:
    ids = [i for i in row.predictions if i in baseline.predictions]
    score = speed = None
    if ids:
        first, second = _columns(row, ids), _columns(baseline, ids)
        score = resampling.paired(first[:2], second[:2])
        speed = resampling.paired(first[2:], second[2:])
    return Difference(
        row=row,
        baseline=baseline,
        num_shared=len(ids),
        num_only_row=len(row.predictions) - len(ids),
        num_only_baseline=len(baseline.predictions) - len(ids),
        score=score,
        tokens_per_forward=speed,
    )


def _areas(measured: Sequence[Measured]) -> dict[str, tuple[float, int]]:
    best = max(m.score.estimate for m in measured)
    points: dict[str, list[tuple[float, float]]] = {}
    for m in measured:
        points.setdefault(m.row.method, []).append((m.tokens_per_forward.estimate, m.score.estimate))
    return {method: (accuracy_under_parallelism(values, best), len(values)) for method, values in points.items()}


def _grids(measured: Sequence[Measured], collection: Collection) -> list[Grid]:
    names = {run.source: varied_options([r for r in collection.runs if r.source == run.source])
             for run in collection.runs}  # fmt: skip
    cells: dict[str, dict[tuple[str, str], list[Measured]]] = {}
    axes: dict[str, list[str]] = {}
    for m in measured:
        if len(names[m.row.run.source]) != 2 or not m.row.run.options:
            continue
        y_name, x_name = axes[m.row.method] = names[m.row.run.source]
        place = (_key(m.row.run.options.get(y_name)), _key(m.row.run.options.get(x_name)))
        cells.setdefault(m.row.method, {}).setdefault(place, []).append(m)
    grids = []
    for method, found in cells.items():
        y_name, x_name = axes[method]
        ys, xs = (sorted({place[axis] for place in found}, key=_order) for axis in (0, 1))
        for figure in ("score", "tokens_per_forward"):
            values = [[_mean([getattr(m, figure).estimate for m in found.get((y, x), [])]) for x in xs] for y in ys]
            grids.append(
                Grid(
                    method=method, figure=figure, x_name=x_name, y_name=y_name, x_values=xs, y_values=ys, values=values
                )
            )
    return grids


def _key(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _order(key: str) -> tuple[int, float, str]:
    """Numbers by size, then everything else by name."""
    try:
        return 0, float(key), key
    except ValueError:
        return 1, 0.0, key


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
