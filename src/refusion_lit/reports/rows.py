"""Rows of a report: the decoders that ``test`` and ``sweep`` measured, read from their results and predictions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from refusion_lit.reports.intervals import Interval, ratio_difference, ratio_interval, score_difference, score_interval
from refusion_lit.reports.results import RESULTS, format_options, read_latency, read_results
from refusion_lit.utils.files import read_fingerprint, read_object
from refusion_lit.utils.nested import get_nested
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class ScoredPrediction:
    """A prediction, reduced to what a report shows; ``score`` is in [0, 1]."""

    id: str
    prompt: str
    response: str
    reference: str | None
    score: float
    num_tokens: int
    num_forwards: int
    metrics: Mapping[str, float]

    @property
    def example(self) -> tuple[str, str, str | None]:
        """Id, prompt and reference. The id alone does not identify an example: every data seed has the same ids."""
        return self.id, self.prompt, self.reference


@dataclass(kw_only=True, eq=False)
class ReportRow:
    """A row of a report: a decoder that a test measured.

    Attributes:
        decoder: The decoder's name in the config.
        decoder_class: The decoder's class; empty if it was not recorded.
        run: The test's directory, relative to the report's argument.
        source: The argument's unique name.
        point: Options of the sweep's point by full name; empty outside a sweep.
        results: Content of ``results.json``, which all decoders of the test share.
        figures: Aggregate figures in the results; see :class:`~refusion_lit.metrics.DecodingMetrics`.
        latency: Speeds measured in turns, by batch size; empty if none were measured.
        mismatches: Why the model was not trained for this decoder; empty if it was.
        predictions: Predictions by prompt id; empty without a predictions file.
        method: Rows with the same method form a trade-off curve. This and the following are set by
            :func:`~refusion_lit.reports.comparison.compare`.
        name: The row's name without options.
        options: The options that differ between the sweep's points: texts by full name.
        prompts: Number of prompts in words; if another row has more prompts, with the largest number.
        on_front: Whether the row is on the Pareto front.
        has_other_prompts: Whether the row's prompts differ from the front's prompts.
        baseline: The row with which this row is compared; a baseline is compared with itself.
    """

    decoder: str
    decoder_class: str
    run: str
    source: str
    point: dict[str, Any]
    results: dict[str, Any]
    figures: dict[str, Any]
    latency: dict[str, dict[str, Any]]
    mismatches: list[str]
    predictions: dict[str, ScoredPrediction]
    method: str = ""
    name: str = ""
    options: dict[str, str] = field(default_factory=dict)
    prompts: str = ""
    on_front: bool = False
    has_other_prompts: bool = False
    baseline: ReportRow = field(init=False, repr=False)

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
    def has_intervals(self) -> bool:
        """``False`` without predictions; the figures of ``results.json`` are shown then."""
        return any(prediction.num_forwards for prediction in self.predictions.values())

    @property
    def num_prompts(self) -> int:
        """Number of tested prompts; 0 if unknown."""
        return len(self.predictions) if self.has_intervals else int(self.figures.get("num_prompts", 0))

    @cached_property
    def score(self) -> Interval:
        """Mean score in percent."""
        if not self.has_intervals:
            return Interval(100 * float(self.figures["score"]))
        return score_interval(_scores(self.predictions.values()))

    @cached_property
    def tokens_per_forward(self) -> Interval:
        """Total tokens divided by total forwards."""
        if not self.has_intervals:
            return Interval(float(self.figures.get("tokens_per_forward", 0.0)))
        return ratio_interval(*_counts(self.predictions.values()))

    @cached_property
    def shared(self) -> list[tuple[ScoredPrediction, ScoredPrediction]]:
        """Pairs of predictions for the same example, from the row and from the baseline; none for a baseline."""
        others = {} if self.baseline is self else self.baseline.predictions
        return [(p, others[i]) for i, p in self.predictions.items() if i in others and p.example == others[i].example]

    @property
    def num_only_row(self) -> int:
        """Number of prompts that the baseline lacks."""
        return len(self.predictions.keys() - self.baseline.predictions.keys())

    @property
    def num_only_baseline(self) -> int:
        """Number of prompts that only the baseline has."""
        return len(self.baseline.predictions.keys() - self.predictions.keys())

    @property
    def num_differing(self) -> int:
        """Number of shared ids under which row and baseline have different prompts or references."""
        return len(self.predictions) - self.num_only_row - len(self.shared)

    @cached_property
    def score_difference(self) -> Interval:
        """Score minus the baseline's score over shared prompts, in percentage points; NaN without shared prompts."""
        return score_difference(*map(_scores, zip(*self.shared, strict=True))) if self.shared else Interval(math.nan)

    @cached_property
    def tokens_per_forward_difference(self) -> Interval:
        """Tokens per forward minus the baseline's over shared prompts; NaN without shared prompts."""
        return ratio_difference(*map(_counts, zip(*self.shared, strict=True))) if self.shared else Interval(math.nan)


def _scores(predictions: Iterable[ScoredPrediction]) -> list[float]:
    """Return scores in percent, by prompt."""
    return [100 * prediction.score for prediction in predictions]


def _counts(predictions: Iterable[ScoredPrediction]) -> tuple[list[float], list[float]]:
    """Return token and forward counts, by prompt."""
    pairs = [(float(prediction.num_tokens), float(prediction.num_forwards)) for prediction in predictions]
    return [tokens for tokens, _ in pairs], [forwards for _, forwards in pairs]


def read_rows(paths: Sequence[str | Path]) -> tuple[list[ReportRow], list[str]]:
    """Read the rows of all tests in directories and below.

    Args:
        paths: Run or sweep directories, or ``results.json`` files.

    Returns:
        Rows and notes for the reader. A sweep's tests are in point order, other tests in path order. Notes name
        unreadable files, missing predictions and failed points.

    Raises:
        ValueError: If a path does not exist or has no readable results.
    """
    notes: list[str] = []
    tests: dict[Path, list[ReportRow]] = {}
    folders = [path.parent if path.is_file() else path for path in map(Path, paths)]
    sources = [_source_name(folder) for folder in folders]
    if len(set(sources)) < len(sources):  # directories with the same name in different places
        sources = [str(folder) for folder in folders]
    for source, argument, folder in zip(sources, map(Path, paths), folders, strict=True):
        require(argument.exists(), "RUN", "the directory of a run or a sweep", str(argument), "check the path")
        files = _list_files(folder, RESULTS) if argument.is_dir() else [argument]
        readable: dict[Path, list[ReportRow]] = {}
        errors = []
        for path in files:
            try:
                readable[path.resolve()] = read_test(path, notes, source, folder)
            except ValueError as error:
                errors.append(error)
                notes.append(f"{path} could not be read and was left out: {str(error).removeprefix(f'{path}: ')}")
        if errors and not any(readable.values()):
            raise errors[0]
        got = f"{', '.join(map(str, files))}, which no `test` wrote" if files else "none"
        expected = f"the {RESULTS} of a finished `test` in {argument} or below"
        require(any(readable.values()), "RUN", expected, got, "run `refusion-lit test` first")
        notes += _note_failed_points(folder) if argument.is_dir() else []
        tests |= readable
    rows = [row for test in tests.values() for row in test]
    return rows, list(dict.fromkeys(notes))  # overlapping paths give the same notes


def _source_name(directory: Path) -> str:
    """Return a directory's name, with its parent's name for ``runs/NAME/version_0``."""
    path = directory.resolve()
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"version_\d+", path.name) else path.name


def _list_files(folder: Path, name: str) -> list[Path]:
    """Return all files with a name below a directory in path order, within a sweep in point order.

    Points that are no longer in the sweep are left out.
    """
    numbers = {
        path.parent / "points" / str(identity): f"{number:09d}"
        for path in folder.rglob("sweep.json")
        for number, identity in enumerate(read_object(path).get("points") or [])
    }

    def key(path: Path) -> list[str]:
        return [numbers.get(parent, parent.name) for parent in reversed(path.parents)]

    parents = {point.parent for point in numbers}
    files = [path for path in folder.rglob(name) if numbers.keys() >= {p for p in path.parents if p.parent in parents}]
    return sorted(files, key=key)


def _note_failed_points(directory: Path) -> list[str]:
    """Return a note per failed point."""
    notes = []
    for path in _list_files(directory, "outcome.json"):
        outcome = read_object(path)
        if outcome.get("status") == "failed":
            point = format_options(_read_point(path.parent)) or path.parent.name
            error = str(outcome.get("error") or "no reason recorded").strip().splitlines()
            notes.append(f"A point of the sweep failed and is not shown ({point}): {error[-1]}")
    return notes


def _read_point(directory: Path) -> dict[str, Any]:
    """Return the options of a sweep's point, given its directory."""
    options = read_object(directory / "point.json").get("options")
    return options if isinstance(options, dict) else {}


def read_test(path: Path, notes: list[str], source: str = "", argument: Path | None = None) -> list[ReportRow]:
    """Read a test's rows. If no prediction is missing, scores are computed again from the predictions.

    Args:
        path: The test's ``results.json``.
        notes: Notes for the reader are appended here.
        source: The report's argument, by its unique name.
        argument: The argument's directory; by default the test's directory.

    Returns:
        A row per decoder; none if another program wrote the file.

    Raises:
        ValueError: If the file cannot be read.
    """
    folder, results = path.parent, read_results(path)
    if results is None:
        return []
    is_below = argument not in (None, folder)
    run = str(folder.relative_to(argument or folder)) if is_below else folder.resolve().name
    point = _read_point(folder.parent) if is_below else {}
    rows = []
    for decoder, figures in results["results"].items():
        predictions = read_scores(folder, decoder, notes)
        num_prompts = figures.get("num_prompts", 0)
        if not predictions:
            notes.append(f"{run}: no predictions of {decoder}, so it has no intervals.")
        elif len(predictions) < num_prompts:
            notes.append(
                f"{run}: {decoder} was tested on {num_prompts} prompts, but its predictions file has "
                f"{len(predictions)}; figures with intervals are based on these."
            )
        else:
            figures["score"] = sum(p.score for p in predictions.values()) / len(predictions)
            for name in results["metrics"]:
                figures[name] = sum(p.metrics.get(name, 0.0) for p in predictions.values()) / len(predictions)
        rows.append(
            ReportRow(
                decoder=decoder,
                decoder_class=str(get_nested(results["decoders"].get(decoder), "class") or ""),
                run=run,
                source=source,
                point=point,
                results=results,
                figures=figures,
                latency=read_latency(results).get(decoder, {}),
                mismatches=list(results["mismatches"].get(decoder) or []),
                predictions=predictions,
            )
        )
    return rows


def read_scores(folder: Path, decoder: str, notes: list[str]) -> dict[str, ScoredPrediction]:
    """Return a decoder's predictions by prompt id.

    Scores that ``refusion-lit score`` wrote for the same predictions replace the test's scores.

    Args:
        folder: The run's directory.
        decoder: The decoder's name in the config.
        notes: Notes for the reader are appended here.
    """
    original, scored = (folder / f"predictions_{decoder}{suffix}" for suffix in (".jsonl", ".scored.jsonl"))
    predictions = _read_predictions(original, notes)
    if not scored.is_file():
        return predictions
    scores = _read_predictions(scored, notes)
    is_same = (read_fingerprint(original) or {}) == (read_fingerprint(scored) or {})
    if original.is_file() and not (is_same and scores.keys() == predictions.keys()):
        notes.append(f"{scored.name} scores other predictions than {original.name} has, and was left out.")
        return predictions
    notes.append(f"{scored.name}: `refusion-lit score` computed the scores of {decoder}.")
    return scores


def _read_predictions(path: Path, notes: list[str]) -> dict[str, ScoredPrediction]:
    """Read predictions by prompt id; the first prediction per id counts. Without a file there are none."""
    predictions: dict[str, ScoredPrediction] = {}
    if not path.is_file():
        return predictions
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                prediction = _parse(json.loads(line))
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                notes.append(f"{path.name}, line {number}: not a prediction, left out.")
                continue
            predictions.setdefault(prediction.id, prediction)
    return predictions


def _parse(values: Mapping[str, Any]) -> ScoredPrediction:
    """Return the prediction on a line.

    Raises:
        ValueError: If a value is out of range; other types for missing values or wrong types.
    """
    reference = values.get("reference")
    prediction = ScoredPrediction(
        **{name: str(values[name]) for name in ("id", "prompt", "response")},
        reference=None if reference is None else str(reference),
        score=float(values["score"] or 0.0),  # a missing score counts as 0, as in the metrics
        num_tokens=int(values["num_tokens"]),
        num_forwards=int(values["num_forwards"]),
        metrics={name: float(value) for name, value in (values.get("metrics") or {}).items()},
    )
    # Counts are summed as float64, which is exact below 2**53.
    if not (0 <= prediction.score <= 1 and 0 <= prediction.num_tokens < 2**53 and 0 <= prediction.num_forwards < 2**53):
        raise ValueError("out of range")
    for text in (prediction.id, prediction.prompt, prediction.response, str(reference)):
        text.encode()  # raises for a lone surrogate, which no file can hold
    return prediction
