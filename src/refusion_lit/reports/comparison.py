"""Compares decoders: rows with intervals, paired differences and the Pareto front."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refusion_lit.reports.intervals import (
    Interval,
    ratio_difference,
    ratio_interval,
    score_difference,
    score_interval,
)
from refusion_lit.reports.results import (
    format_options,
    is_speed_baseline,
    note_on_speeds,
    read_latency,
    shorten_value,
)
from refusion_lit.reports.runs import Run, ScoredPrediction


@dataclass(kw_only=True)
class ComparisonRow:
    """A row of the comparison: a decoder and the run that measured it.

    Attributes:
        name: The row's name without options.
        decoder: The decoder's name in the config.
        method: Rows with the same method form a trade-off curve.
        run: The run that measured the decoder.
        options: The options that the sweep varies: texts by full name; empty outside a sweep.
        on_front: Whether the row is on the Pareto front.
        has_other_prompts: Whether the row's prompts differ from the front's prompts.
    """

    name: str
    decoder: str
    method: str
    run: Run
    options: dict[str, str]
    on_front: bool = False
    has_other_prompts: bool = False

    @property
    def figures(self) -> dict[str, Any]:
        """Aggregate figures; see :class:`~refusion_lit.metrics.DecodingMetrics`."""
        return self.run.results["results"][self.decoder]

    @property
    def latency(self) -> dict[str, dict[str, Any]]:
        """Speeds measured in turns, by batch size; empty if none were measured."""
        return read_latency(self.run.results).get(self.decoder, {})

    @property
    def mismatches(self) -> list[str]:
        """Why the model was not trained for this decoder; empty if it was."""
        return list(self.run.results["mismatches"].get(self.decoder) or [])

    @property
    def predictions(self) -> dict[str, ScoredPrediction]:
        """Predictions by prompt id; empty without a predictions file."""
        return self.run.predictions[self.decoder]

    @property
    def label(self) -> str:
        """Unique name of the row in the report."""
        return f"{self.name} ({format_options(self.options)})" if self.options else self.name

    @property
    def title(self) -> str:
        """The row's name, followed by the decoder's class if that is another word."""
        is_other = self.decoder_class and self.decoder.replace("_", "").lower() != self.decoder_class.lower()
        return f"{self.name} ({self.decoder_class})" if is_other else self.name

    @property
    def decoder_class(self) -> str:
        """The decoder's class; empty if it was not recorded."""
        return str(self.run.results["decoders"].get(self.decoder, {}).get("class") or "")

    @property
    def has_intervals(self) -> bool:
        """``False`` without predictions; low and high then equal the estimate."""
        return any(prediction.num_forwards for prediction in self.predictions.values())

    @property
    def num_prompts(self) -> int:
        """Number of tested prompts; 0 if unknown."""
        return len(self.predictions) if self.has_intervals else int(self.figures.get("num_prompts", 0))

    @property
    def prompts(self) -> frozenset[object]:
        """Ids, prompts and references, which comparable rows share; empty without predictions."""
        return frozenset((identity, p.example) for identity, p in self.predictions.items())

    @cached_property
    def score(self) -> Interval:
        """Mean score in percent."""
        if self.has_intervals:
            return score_interval(_scores(self.predictions.values()))
        value = 100 * float(self.figures["score"])
        return Interval(value, value, value)

    @cached_property
    def tokens_per_forward(self) -> Interval:
        """Total tokens divided by total forwards."""
        if self.has_intervals:
            return ratio_interval(*_counts(self.predictions.values()))
        value = float(self.figures.get("tokens_per_forward", 0.0))
        return Interval(value, value, value)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row minus its baseline over shared prompts: equal ids with equal texts and references.

    Attributes:
        row: The row.
        baseline: The row that it is compared with.
        num_shared: Number of shared prompts.
        num_differing: Number of shared ids whose prompts or references differ.
        num_only_row: Number of prompts missing in the baseline.
        num_only_baseline: Number of prompts missing in the row.
        score: Score difference in percentage points; ``None`` without shared prompts.
        tokens_per_forward: Difference in tokens per forward; ``None`` without shared prompts.
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
        rows: All decoders.
        notes: Remarks for the reader.
        baseline: The baseline's name.
        differences: Paired differences between the other rows and their baseline.
        option_names: Short names for options that sweeps vary, by full name.
        metrics: The tasks' further metrics.
    """

    runs: list[Run]
    rows: list[ComparisonRow]
    notes: list[str]
    baseline: str
    differences: list[Difference]
    option_names: dict[str, str]
    metrics: list[str]

    def find_difference(self, row: ComparisonRow) -> Difference | None:
        """Return a row's difference from its baseline; ``None`` for a baseline."""
        return next((difference for difference in self.differences if difference.row is row), None)

    def count_prompts(self, row: ComparisonRow) -> str:
        """Format a row's prompt count, with the largest count in the table if that is larger."""
        most = max(max(len(other.predictions), int(other.figures.get("num_prompts", 0))) for other in self.rows)
        return f"{row.num_prompts or 'unknown'}" + (f" of {most}" if 0 < row.num_prompts < most else "")


def compare(runs: list[Run], notes: list[str], baseline: str | None = None) -> Comparison:
    """Compare all decoders in some runs.

    Args:
        runs: The runs.
        notes: Remarks for the reader.
        baseline: A row, a decoder (rows are then compared with that decoder in their own run), or an argument (rows
            are then compared with the argument's decoder with the same name). By default the decoder that speeds were
            compared with, or else the first row.

    Raises:
        ValueError: If no row, decoder or argument has the baseline's name.
    """
    rows = _make_rows(runs)
    notes = [*notes, *_mark_front(rows), *filter(None, dict.fromkeys(note_on_speeds(run.results) for run in runs))]
    baseline = baseline or _default_baseline(rows)
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


def _make_rows(runs: Sequence[Run]) -> list[ComparisonRow]:
    """Return a row for every decoder; rows with the same label get the run's name."""
    sources = {run.source: _varied_options([r for r in runs if r.source == run.source]) for run in runs}
    rows = []
    for run in runs:
        options = {name: shorten_value(run.options.get(name)) for name in sources[run.source] if run.options}
        for decoder in run.results["results"]:
            method = f"{run.source}: {decoder}" if len(sources) > 1 else decoder
            rows.append(ComparisonRow(name=method, decoder=decoder, method=method, run=run, options=options))
    labels = Counter(row.label for row in rows)
    for row in [row for row in rows if labels[row.label] > 1]:
        row.name += f" [{row.run.name}]"
    return rows


def _mark_front(rows: Sequence[ComparisonRow]) -> list[str]:
    """Mark the Pareto front over the rows with the most common prompts; return notes on the other rows."""
    prompts = [row.prompts for row in rows]
    counts = Counter(filter(None, prompts))
    common = max(counts, key=lambda examples: (counts[examples], len(examples)), default=frozenset())
    for row, examples in zip(rows, prompts, strict=True):
        is_size_equal = not common or row.num_prompts in (0, len(common))  # all that is known without predictions
        row.has_other_prompts = examples != common if examples else not is_size_equal
    front = [row for row in rows if not row.has_other_prompts]
    for index in pareto_front([(row.tokens_per_forward.estimate, row.score.estimate) for row in front]):
        front[index].on_front = True
    others = ", ".join(row.label for row in rows if row.has_other_prompts)
    return [f"The Pareto front leaves out rows with other prompts than most rows: {others}."] if others else []


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices: the points that no other point dominates.

    A point dominates another if it is at least as good in both coordinates and better in at least one coordinate.

    Args:
        points: Pairs to maximise, for example tokens per forward and score.

    >>> pareto_front([(1, 90), (3, 80), (2, 70)])
    [0, 1]
    """
    return [i for i, (x, y) in enumerate(points) if not any(u >= x and v >= y and (u > x or v > y) for u, v in points)]


def _varied_options(runs: Sequence[Run]) -> list[str]:
    """Return the names of options that differ between a sweep's points.

    If no two points share the name of a decoder, the names identify the points' decoders, and the option that defines
    the decoders is left out.
    """
    runs = [run for run in runs if run.options]
    names = dict.fromkeys(name for run in runs for name in run.options)
    decoders = [decoder for run in runs for decoder in run.results["results"]]
    if len({*decoders}) == len(decoders):
        names.pop("model.decoders", None)
    return [name for name in names if len({json.dumps(run.options.get(name), default=str) for run in runs}) > 1]


def _scores(predictions: Iterable[ScoredPrediction]) -> list[float]:
    """Return scores in percent, by prompt."""
    return [100 * prediction.score for prediction in predictions]


def _counts(predictions: Collection[ScoredPrediction]) -> tuple[list[float], list[float]]:
    """Return token and forward counts, by prompt."""
    return [float(p.num_tokens) for p in predictions], [float(p.num_forwards) for p in predictions]


def _default_baseline(rows: Sequence[ComparisonRow]) -> str:
    """Return the decoder that speeds were compared with, if it is the same in all runs, or else the first row."""
    compared = [row for row in rows if is_speed_baseline(row.latency)]
    if len(compared) == 1:
        return compared[0].label
    names = {row.decoder for row in compared}
    return names.pop() if len(names) == 1 else rows[0].label


def _find_baseline(row: ComparisonRow, rows: Sequence[ComparisonRow], name: str) -> ComparisonRow:
    exact = [other for other in rows if other.label == name]
    same_decoder = [other for other in rows if name in (other.decoder, other.method)]
    same_run = [other for other in same_decoder if other.run is row.run]
    same_source = [other for other in rows if f"/{name.rstrip('/')}".endswith(f"/{other.run.source}")]
    same_source.sort(key=lambda other: other.decoder != row.decoder)
    candidates = exact or same_run or same_decoder or same_source
    if not candidates:
        names = list(dict.fromkeys([*(other.decoder for other in rows), *(other.label for other in rows)]))
        raise ValueError(f"baseline: expected one of {', '.join(names)}; got {name!r}. Choose one of these names.")
    return candidates[0]


def _difference(row: ComparisonRow, baseline: ComparisonRow) -> Difference:
    """Return a row's paired difference from the baseline, over the examples that both rows have."""
    common = [i for i in row.predictions if i in baseline.predictions]
    shared = [i for i in common if row.predictions[i].example == baseline.predictions[i].example]
    first, second = ([side.predictions[i] for i in shared] for side in (row, baseline))
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
    """Shorten dotted names to their last parts, as far as they stay distinct.

    >>> short_names(["model.decoders.a.slot_size", "model.decoders.b.slot_size", "data.seed"]).values()
    dict_values(['a.slot_size', 'b.slot_size', 'seed'])
    """
    short = {}
    for name in names:
        parts = name.split(".")
        endings = [".".join(parts[-number:]) for number in range(1, len(parts) + 1)]
        others = [f".{other}" for other in names if other != name]
        short[name] = next((e for e in endings if not any(o.endswith(f".{e}") for o in others)), name)
    return short
