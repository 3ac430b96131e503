"""Reads results and predictions that ``test`` and ``sweep`` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_lit.reports.results import RESULTS, format_options, read_results
from refusion_lit.utils.files import read_fingerprint, read_object
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class ScoredPrediction:
    """A prediction, reduced to what a report shows; ``score`` is in [0, 1]."""

    prompt: str
    response: str
    reference: str | None
    score: float
    num_tokens: int
    num_forwards: int
    metrics: Mapping[str, float]

    @property
    def example(self) -> tuple[str, str | None]:
        """Prompt and reference, which identify an example. Ids do not, because every data seed has the same ids."""
        return self.prompt, self.reference


@dataclass(frozen=True, kw_only=True)
class Run:
    """A test's results and predictions.

    Attributes:
        name: The run's directory, relative to the report's argument.
        source: The argument's unique name.
        results: Content of ``results.json``.
        options: The point's options that its sweep varies; empty outside a sweep.
        predictions: Predictions by decoder and prompt id; a decoder without a predictions file has an empty mapping.
    """

    name: str
    source: str
    results: dict[str, Any]
    options: dict[str, Any]
    predictions: dict[str, dict[str, ScoredPrediction]]


def read_runs(paths: Sequence[str | Path]) -> tuple[list[Run], list[str]]:
    """Read all runs in directories and below.

    Args:
        paths: Run or sweep directories, or ``results.json`` files.

    Returns:
        Runs and notes for the reader. A sweep's runs are in point order, other runs in path order. Notes name
        unreadable files, missing predictions and failed points.

    Raises:
        ValueError: If a path does not exist or has no readable results.
    """
    notes: list[str] = []
    runs: dict[Path, Run] = {}
    folders = [path.parent if path.is_file() else path for path in map(Path, paths)]
    sources = [_source_name(folder) for folder in folders]
    if len(set(sources)) < len(sources):  # directories with the same name in different places
        sources = [str(folder) for folder in folders]
    for source, argument, folder in zip(sources, map(Path, paths), folders, strict=True):
        if not argument.exists():
            raise ValueError(f"RUN: expected the directory of a run or a sweep, got {argument}; check the path.")
        readable: dict[Path, Run] = {}
        errors, others = [], []
        for path in [argument] if argument.is_file() else _list_files(folder, RESULTS):
            try:
                if (results := read_results(path)) is not None:
                    readable[path.resolve()] = _read_run(path.parent, folder, source, results, notes)
                else:
                    others.append(str(path))
            except ValueError as error:
                errors.append(error)
                reason = str(error).removeprefix(f"{path}: ")
                notes.append(f"{path} could not be read and was left out: {reason}")
        if errors and not readable:
            raise errors[0]
        expected = f"the {RESULTS} of a finished `test` in {argument} or below"
        got = f"{', '.join(others)}, which no `test` wrote" if others else "none"
        require(bool(readable), "RUN", expected, got, "run `refusion-lit test` first")
        if argument.is_dir():
            notes += _note_failed_points(folder)
        runs |= readable
    return list(runs.values()), list(dict.fromkeys(notes))  # overlapping paths give the same notes


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


def _read_run(folder: Path, argument: Path, source: str, results: dict[str, Any], notes: list[str]) -> Run:
    """Create the run in a directory; add notes on missing predictions."""
    name = str(folder.relative_to(argument)) if folder != argument else argument.resolve().name
    predictions = read_all_scores(folder, results, notes)
    for decoder, answers in predictions.items():
        expected = results["results"][decoder].get("num_prompts", 0)
        if not answers:
            notes.append(f"{name}: no predictions of {decoder}, so it has no intervals.")
        elif len(answers) < expected:
            notes.append(
                f"{name}: {decoder} was tested on {expected} prompts, but its predictions file has {len(answers)}; "
                "figures with intervals are based on these."
            )
    options = {} if folder == argument else _read_point_options(folder.parent)
    return Run(name=name, source=source, results=results, options=options, predictions=predictions)


def _source_name(directory: Path) -> str:
    """Return a directory's name, with its parent's name for ``runs/NAME/version_0``."""
    path = directory.resolve()
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"version_\d+", path.name) else path.name


def _read_point_options(point: Path) -> dict[str, Any]:
    """Return a point's options, given its directory."""
    options = read_object(point / "point.json").get("options")
    return options if isinstance(options, dict) else {}


def _note_failed_points(directory: Path) -> list[str]:
    """Return a note per failed point."""
    notes = []
    for path in _list_files(directory, "outcome.json"):
        outcome = read_object(path)
        if outcome.get("status") == "failed":
            point = format_options(_read_point_options(path.parent)) or path.parent.name
            error = str(outcome.get("error") or "no reason recorded").strip().splitlines()
            notes.append(f"A point of the sweep failed and is not shown ({point}): {error[-1]}")
    return notes


def read_all_scores(folder: Path, results: dict[str, Any], notes: list[str]) -> dict[str, dict[str, ScoredPrediction]]:
    """Return a run's predictions by decoder; recompute the scores in its results where no prediction is missing.

    Args:
        folder: The run's directory.
        results: Content of the run's ``results.json``, which is changed.
        notes: Notes for the reader are appended here.
    """
    predictions = {}
    for decoder, figures in results["results"].items():
        answers = predictions[decoder] = read_scores(folder, decoder, notes)
        if answers and len(answers) >= figures.get("num_prompts", 0):
            figures["score"] = sum(answer.score for answer in answers.values()) / len(answers)
            for name in results["metrics"]:
                figures[name] = sum(answer.metrics.get(name, 0.0) for answer in answers.values()) / len(answers)
    return predictions


def read_scores(folder: Path, decoder: str, notes: list[str]) -> dict[str, ScoredPrediction]:
    """Return a decoder's predictions by prompt id.

    Scores that ``refusion-lit score`` wrote for the same predictions replace the test's scores.

    Args:
        folder: The run's directory.
        decoder: The decoder's name in the config.
        notes: Notes for the reader are appended here.
    """
    original, scored = (folder / f"predictions_{decoder}{suffix}" for suffix in (".jsonl", ".scored.jsonl"))
    predictions = _read_predictions(original, notes) if original.is_file() else {}
    if scored.is_file():
        scores = _read_predictions(scored, notes)
        is_same = (read_fingerprint(original) or {}) == (read_fingerprint(scored) or {})
        if original.is_file() and not (is_same and scores.keys() == predictions.keys()):
            notes.append(f"{scored.name} scores other predictions than {original.name} has, and was left out.")
            return predictions
        notes.append(f"{scored.name}: `refusion-lit score` computed the scores of {decoder}.")
        return scores
    return predictions


def _read_predictions(path: Path, notes: list[str]) -> dict[str, ScoredPrediction]:
    """Read predictions by prompt id; the first prediction per id counts."""
    predictions: dict[str, ScoredPrediction] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                identity, prediction = _parse(json.loads(line))
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                notes.append(f"{path.name}, line {number}: not a prediction, left out.")
                continue
            predictions.setdefault(identity, prediction)
    return predictions


def _parse(values: Mapping[str, Any]) -> tuple[str, ScoredPrediction]:
    """Return the prompt id and the prediction on a line.

    Raises:
        ValueError: If a value is out of range; other types for missing values or wrong types.
    """
    score = float(values["score"] or 0.0)  # a missing score counts as 0, as in the metrics
    num_tokens = int(values["num_tokens"])
    num_forwards = int(values["num_forwards"])
    # Counts are summed as float64, which is exact below 2**53.
    if not (0 <= score <= 1 and 0 <= num_tokens < 2**53 and 0 <= num_forwards < 2**53):
        raise ValueError("out of range")
    reference = values.get("reference")
    identity, prompt, response = (str(values[key]) for key in ("id", "prompt", "response"))
    for text in (identity, prompt, response, str(reference)):
        text.encode()  # raises for a lone surrogate, which no file can hold
    return identity, ScoredPrediction(
        prompt=prompt,
        response=response,
        reference=None if reference is None else str(reference),
        score=score,
        num_tokens=num_tokens,
        num_forwards=num_forwards,
        metrics={name: float(value) for name, value in (values.get("metrics") or {}).items()},
    )
