"""Compares decoders: names and options of rows, their baselines and the Pareto front."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from refusion_lit.reports.results import is_speed_baseline, note_on_speeds, shorten_value
from refusion_lit.reports.rows import ReportRow


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The contents of a report.

    Attributes:
        rows: All decoders.
        notes: Remarks for the reader.
        baseline: The baseline's name.
        option_names: Short names for options that sweeps vary, by full name.
        metrics: The tasks' further metrics.
    """

    rows: list[ReportRow]
    notes: list[str]
    baseline: str
    option_names: dict[str, str]
    metrics: list[str]

    @property
    def compared(self) -> list[ReportRow]:
        """The rows that are compared with another row."""
        return [row for row in self.rows if row.baseline is not row]


def compare(rows: list[ReportRow], notes: list[str], baseline: str | None = None) -> Comparison:
    """Compare decoders: name the rows, and find their baselines and the Pareto front.

    Args:
        rows: The rows, which are completed.
        notes: Remarks for the reader.
        baseline: A row, a decoder (rows are then compared with that decoder in their own run), or an argument (rows
            are then compared with the argument's decoder with the same name). By default the speeds' baseline, or else
            the first row.

    Raises:
        ValueError: If no row, decoder or argument has the baseline's name.
    """
    _name_rows(rows)
    speeds = dict.fromkeys(note_on_speeds(row.results) for row in rows)
    baseline = baseline or _default_baseline(rows)
    most = max(max(len(row.predictions), int(row.figures.get("num_prompts", 0))) for row in rows)
    for row in rows:
        row.baseline = _find_baseline(row, rows, baseline)
        row.prompts = f"{row.num_prompts or 'unknown'}" + (f" of {most}" if 0 < row.num_prompts < most else "")
    return Comparison(
        rows=rows,
        notes=[*notes, *_mark_front(rows), *filter(None, speeds)],
        baseline=baseline,
        option_names=short_names(list(dict.fromkeys(name for row in rows for name in row.options))),
        metrics=list(dict.fromkeys(name for row in rows for name in row.results["metrics"])),
    )


def _name_rows(rows: Sequence[ReportRow]) -> None:
    """Set the rows' names and options; rows with the same label get the test's directory."""
    varied = {source: _varied_options([r for r in rows if r.source == source]) for source in {r.source for r in rows}}
    for row in rows:
        row.options = {name: shorten_value(row.point.get(name)) for name in varied[row.source] if row.point}
        row.name = row.method = f"{row.source}: {row.decoder}" if len(varied) > 1 else row.decoder
    labels = Counter(row.label for row in rows)
    for row in [row for row in rows if labels[row.label] > 1]:
        row.name += f" [{row.run}]"


def _varied_options(rows: Sequence[ReportRow]) -> list[str]:
    """Return the names of options that differ between a sweep's points.

    If every point's decoder has a different name, the names suffice, and the option that defines the decoders is left
    out.
    """
    rows = [row for row in rows if row.point]
    names = dict.fromkeys(name for row in rows for name in row.point)
    if len({row.decoder for row in rows}) == len(rows):
        names.pop("model.decoders", None)
    return [name for name in names if len({json.dumps(row.point.get(name), default=str) for row in rows}) > 1]


def _mark_front(rows: Sequence[ReportRow]) -> list[str]:
    """Mark the Pareto front over the rows with the most common prompts; return notes on the other rows."""
    prompts = [frozenset(prediction.example for prediction in row.predictions.values()) for row in rows]
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


def _default_baseline(rows: Sequence[ReportRow]) -> str:
    """Return the speeds' baseline if all runs have the same, or else the first row."""
    compared = [row for row in rows if is_speed_baseline(row.latency)]
    if len(compared) == 1:
        return compared[0].label
    names = {row.decoder for row in compared}
    return names.pop() if len(names) == 1 else rows[0].label


def _find_baseline(row: ReportRow, rows: Sequence[ReportRow], name: str) -> ReportRow:
    exact = [other for other in rows if other.label == name]
    same_decoder = [other for other in rows if name in (other.decoder, other.method)]
    same_run = [other for other in same_decoder if other.results is row.results]
    same_source = [other for other in rows if f"/{name.rstrip('/')}".endswith(f"/{other.source}")]
    same_source.sort(key=lambda other: other.decoder != row.decoder)
    candidates = exact or same_run or same_decoder or same_source
    if not candidates:
        names = list(dict.fromkeys([*(other.decoder for other in rows), *(other.label for other in rows)]))
        raise ValueError(f"baseline: expected one of {', '.join(names)}; got {name!r}. Choose one of these names.")
    return candidates[0]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Shorten dotted names to their last parts, as far as they stay distinct.

    >>> short_names(["model.decoders.a.slot_size", "model.decoders.b.slot_size", "data.seed"]).values()
    dict_values(['a.slot_size', 'b.slot_size', 'seed'])
    """

    def shorten(name: str) -> str:
        parts = name.split(".")
        endings = (".".join(parts[-number:]) for number in range(1, len(parts) + 1))
        return next((e for e in endings if sum(f".{other}".endswith(f".{e}") for other in names) == 1), name)

    return {name: shorten(name) for name in names}
