"""Reads the results and predictions of ``test`` and ``sweep`` from their directories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_lit.reports.results import RESULTS, parse_results, read_results
from refusion_lit.utils.files import read_fingerprint, read_object
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class ScoredPrediction:
    """One line of a predictions file, reduced to what a report shows. ``score`` is in [0, 1]."""

    prompt: str
    response: str
    reference: str | None
    score: float
    num_tokens: int
    num_forwards: int
    metrics: Mapping[str, float]

    @property
    def example(self) -> tuple[str, str | None]:
        """Prompt and reference. Predictions compare only where these are equal: another data seed keeps the ids."""
        return self.prompt, self.reference


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of one ``test``.

    Attributes:
        name: Path of the run's directory relative to the argument that it was found under.
        source: A name of that argument, unique among the arguments.
        results: Content of ``results.json``.
        options: The swept options of this point; empty outside a sweep.
        predictions: Predictions by prompt id for each decoder; empty for one without a predictions file.
    """

    name: str
    source: str
    results: dict[str, Any]
    options: dict[str, Any]
    predictions: dict[str, dict[str, ScoredPrediction]]

    @classmethod
    def of_test(cls, directory: Path, results: Any, predictions: dict[str, dict[str, ScoredPrediction]]) -> Run:  # noqa: ANN401 - JSON
        """Return the run of a test that has just ended.

        Args:
            directory: The run's directory.
            results: Content of its ``results.json``.
            predictions: Predictions by decoder and prompt id.
        """
        results = parse_results(results, directory / RESULTS) or {}
        source = _source_name(directory)
        return cls(name=directory.resolve().name, source=source, results=results, options={}, predictions=predictions)


def read_runs(paths: Sequence[str | Path]) -> tuple[list[Run], list[str]]:
    """Read all runs in the given directories and below.

    Args:
        paths: Directories of runs or sweeps, or single ``results.json`` files.

    Returns:
        The runs, those of a sweep in its order and others in the order of their paths, and remarks for the reader:
        unreadable files, missing predictions, failed points.

    Raises:
        ValueError: If a path does not exist, or has no results that can be read.
    """
    notes: list[str] = []
    runs: dict[Path, Run] = {}
    arguments = [Path(path) for path in paths]
    folders = [path.parent if path.is_file() else path for path in arguments]
    sources = [_source_name(folder) for folder in folders]
    if len(set(sources)) < len(sources):  # directories with the same name in different places
        sources = [str(folder) for folder in folders]
    for source, argument, folder in zip(sources, arguments, folders, strict=True):
        if not argument.exists():
            raise ValueError(f"RUN: expected the directory of a run or a sweep, got {argument}; check the path.")
        files = [argument] if argument.is_file() else _files_of_points(folder, RESULTS)
        found = []
        errors = []
        for path in files:
            try:
                results = read_results(path)
                found += [] if results is None else [(path, _run(path.parent, folder, source, results, notes))]
            except ValueError as error:
                errors.append(error)
                reason = str(error).removeprefix(f"{path}: ")
                notes.append(f"{path} could not be read and was left out: {reason}")
        if errors and not found:
            raise errors[0]
        expected = f"the {RESULTS} of a finished `test` in {argument} or below"
        require(bool(found), "RUN", expected, None, "run `refusion-lit test` first")
        if argument.is_dir():
            notes += _failed_points(folder)
        runs |= {path.resolve(): run for path, run in found}
    return list(runs.values()), list(dict.fromkeys(notes))  # overlapping paths note the same twice


def _files_of_points(folder: Path, name: str) -> list[Path]:
    """Return the files of a name below a directory in the order of paths, those of a sweep in the order of its points.

    Points of other options that the sweep had before are left out.
    """
    numbers = {
        path.parent / "points" / str(identity): f"{number:09d}"
        for path in folder.rglob("sweep.json")
        for number, identity in enumerate(read_object(path).get("points") or [])
    }

    def key(path: Path) -> list[str]:
        return [numbers.get(parent, parent.name) for parent in reversed(path.parents)]

    swept = {parent.parent for parent in map(Path, numbers)}
    files = [path for path in folder.rglob(name) if numbers.keys() >= {p for p in path.parents if p.parent in swept}]
    return sorted(files, key=key)


def _run(folder: Path, argument: Path, source: str, results: dict[str, Any], notes: list[str]) -> Run:
    relative = folder.relative_to(argument)
    name = str(relative) if relative.parts else argument.resolve().name
    predictions = with_scores(folder, results, notes)
    for decoder, found in predictions.items():
        expected = results["results"][decoder].get("num_prompts", 0)
        if not found:
            notes.append(f"{name}: no predictions of {decoder}, so it has no intervals.")
        elif len(found) < expected:
            notes.append(
                f"{name}: {decoder} was tested on {expected} prompts, but its predictions files have {len(found)}; "
                "figures with intervals are based on these."
            )
    options = {} if folder == argument else _swept_options(folder.parent)
    return Run(name=name, source=source, results=results, options=options, predictions=predictions)


def _source_name(argument: Path) -> str:
    """Return the directory's name, with its parent's for ``runs/NAME/version_0``."""
    path = argument.resolve()
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"version_\d+", path.name) else path.name


def _swept_options(point: Path) -> dict[str, Any]:
    """Return the swept options of a point of a sweep, given its directory."""
    options = read_object(point / "point.json").get("options")
    return options if isinstance(options, dict) else {}


def _failed_points(argument: Path) -> list[str]:
    notes = []
    for path in _files_of_points(argument, "outcome.json"):
        outcome = read_object(path)
        if outcome.get("status") == "failed":
            options = _swept_options(path.parent).items()
            point = ", ".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in options) or path.parent.name
            error = str(outcome.get("error") or "no reason recorded").strip().splitlines()
            notes.append(f"A point of the sweep failed and is not shown ({point}): {error[-1]}")
    return notes


def with_scores(folder: Path, results: dict[str, Any], notes: list[str]) -> dict[str, dict[str, ScoredPrediction]]:
    """Return the predictions of a run's decoders; where all are there, their scores replace those of the results.

    So ``refusion-lit score`` decides, which may have run after the test.

    Args:
        folder: The run's directory.
        results: The content of its ``results.json``, which is changed.
        notes: Remarks for the reader are appended here.
    """
    predictions = {}
    for decoder, figures in results["results"].items():
        found = predictions[decoder] = read_scores(folder, decoder, notes)
        if found and len(found) >= figures.get("num_prompts", 0):
            figures["score"] = sum(each.score for each in found.values()) / len(found)
            for name in results["metrics"]:
                figures[name] = sum(each.metrics.get(name, 0.0) for each in found.values()) / len(found)
    return predictions


def read_scores(folder: Path, decoder: str, notes: list[str]) -> dict[str, ScoredPrediction]:
    """Return a decoder's predictions by prompt id.

    Scores that ``refusion-lit score`` wrote for the same predictions replace the scores of the test.

    Args:
        folder: The run's directory.
        decoder: The decoder's name in the config.
        notes: Remarks for the reader are appended here: rescored files, lines that are not predictions.
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
    """Return the predictions of a file by prompt id; the first of several with equal ids counts."""
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


def parse_predictions(lines: Iterable[Mapping[str, Any]]) -> dict[str, ScoredPrediction]:
    """Return the predictions of a test by prompt id."""
    return dict(map(_parse, lines))


def _parse(values: Mapping[str, Any]) -> tuple[str, ScoredPrediction]:
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
