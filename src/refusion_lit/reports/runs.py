"""Collects the results and predictions of ``test`` and ``sweep`` from their directories into rows to compare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.reports.results import RESULTS, read_results, short
from refusion_lit.utils.files import read_fingerprint, read_json

_SCORED = ".scored.jsonl"


@dataclass(frozen=True, kw_only=True)
class ScoredPrediction:
    """One line of a predictions file, reduced to what a report shows. ``score`` is in [0, 1]."""

    prompt: str
    response: str
    reference: str | None
    score: float
    num_tokens: int
    num_forwards: int


@dataclass(kw_only=True)
class Run:
    """The results of one ``test``.

    Attributes:
        path: The run's directory.
        name: The directory's path relative to the argument that it was found under.
        source: A name of that argument, unique among the arguments.
        results: Content of ``results.json``.
        environment: The recorded environment; see :func:`~refusion_lit.reports.results.environment`.
        config: The resolved config as YAML; empty if none was recorded.
        options: The swept options of this point; empty outside a sweep.
        predictions: Predictions by prompt id for each decoder; ``None``: they are in files of the directory.
    """

    path: Path
    name: str
    source: str
    results: dict[str, Any]
    environment: dict[str, Any]
    config: str
    options: dict[str, Any]
    predictions: dict[str, dict[str, ScoredPrediction]] | None = None

    @property
    def batch_size(self) -> int | None:
        """Maximum number of prompts per call of the model."""
        return self.results.get("batch_size")


@dataclass(kw_only=True)
class Row:
    """One decoder of one run: a row of the comparison.

    Attributes:
        name: Name of the row without its options.
        decoder: The decoder's name in the config.
        method: Rows with the same method form one trade-off curve.
        run: The run that measured the decoder.
        figures: Aggregate figures of the test; see :class:`~refusion_lit.metrics.DecodingMetrics`.
        mismatches: Why the model was not trained for this decoder; empty if it was.
        predictions: Predictions by prompt id; empty if the run has no predictions file.
        options: Values of the options that the row's sweep varies, as texts by their full names; empty outside a sweep.
    """

    name: str
    decoder: str
    method: str
    run: Run
    figures: dict[str, Any]
    mismatches: list[str]
    predictions: dict[str, ScoredPrediction]
    options: dict[str, str]

    @property
    def label(self) -> str:
        """Unique name of the row in the report."""
        options = ", ".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(kw_only=True)
class Collection:
    """Runs and rows to compare.

    Attributes:
        runs: The runs: those of a sweep in its order, others in the order of their paths.
        rows: The decoders of all runs.
        notes: Remarks for the reader: unreadable files, missing predictions, failed points.
    """

    runs: list[Run]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def read_runs(paths: Sequence[str | Path]) -> Collection:
    """Read all runs in the given directories and below.

    Args:
        paths: Directories of runs or sweeps, or single ``results.json`` files.

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
        files = [argument] if argument.is_file() else _result_files(folder)
        found = []
        errors = []
        for path in files:
            try:
                results = read_results(path)
                found += [] if results is None else [_run(path.parent, folder, source, results)]
            except ValueError as error:
                errors.append(error)
                reason = str(error).removeprefix(f"{path}: ")
                notes.append(f"{path} could not be read and was left out: {reason}")
        if errors and not found:
            raise errors[0]
        if not found:
            raise ValueError(
                f"RUN: expected the {RESULTS} of a finished `test` in {argument} or below, got none; "
                "run `refusion-lit test` first."
            )
        if argument.is_dir():
            notes += _failed_points(folder)
        runs |= {run.path.resolve(): run for run in found}
    return Collection(runs=list(runs.values()), rows=_rows(list(runs.values()), notes), notes=notes)


def _varied_options(runs: Sequence[Run]) -> list[str]:
    """Return the names of the options that differ between the points of a sweep."""
    runs = [run for run in runs if run.options]
    names = dict.fromkeys(name for run in runs for name in run.options)
    return [name for name in names if len({json.dumps(run.options.get(name), default=str) for run in runs}) > 1]


def _result_files(folder: Path) -> list[Path]:
    """Return the results below a directory in the order of their paths; the points of a sweep are in its own order."""
    numbers = {
        path.parent / "points" / str(identity): f"{number:09d}"
        for path in folder.rglob("sweep.json")
        for number, identity in enumerate(_read_object(path).get("points") or [])
    }

    def key(path: Path) -> list[str]:
        return [numbers.get(parent, parent.name) for parent in reversed(path.parents)]

    return sorted(folder.rglob(RESULTS), key=key)


def run_of(
    folder: Path, results: dict[str, Any], predictions: dict[str, dict[str, ScoredPrediction]] | None
) -> Collection:
    """Return a single run of which this process has the results, without reading its files.

    Args:
        folder: The run's directory.
        results: What ``results.json`` holds.
        predictions: Predictions by prompt id for each decoder; ``None``: read their files.
    """
    results = json.loads(json.dumps(results))  # lists for tuples, as the file has them
    run = _run(folder, folder, _source_name(folder), results)
    run.predictions = predictions
    notes: list[str] = []
    return Collection(runs=[run], rows=_rows([run], notes), notes=notes)


def _run(folder: Path, argument: Path, source: str, results: dict[str, Any]) -> Run:
    relative = folder.relative_to(argument)
    config = results.get("config")
    return Run(
        path=folder,
        name=str(relative) if relative.parts else argument.resolve().name,
        source=source,
        results=results,
        environment=results.get("environment") or {},
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else "",
        options=_point_options(folder, argument),
    )


def _source_name(argument: Path) -> str:
    """Return the directory's name, with its parent's for ``runs/NAME/version_0``."""
    path = argument.resolve()
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"version_\d+", path.name) else path.name


def _point_options(folder: Path, argument: Path) -> dict[str, Any]:
    """Return the swept options of the point that a directory belongs to."""
    for candidate in (folder, *folder.parents):
        options = _read_object(candidate / "point.json").get("options")
        if isinstance(options, dict):
            return options
        if candidate == argument:
            break
    return {}


def _failed_points(argument: Path) -> list[str]:
    notes = []
    for path in sorted(argument.rglob("outcome.json")):
        outcome = _read_object(path)
        if outcome.get("status") == "failed":
            options = _read_object(path.parent / "point.json").get("options")
            names = options.items() if isinstance(options, dict) else ()
            point = ", ".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in names) or path.parent.name
            error = str(outcome.get("error") or "no reason recorded").strip().splitlines()
            notes.append(f"A point of the sweep failed and is not shown ({point}): {error[-1]}")
    return notes


def _rows(runs: Sequence[Run], notes: list[str]) -> list[Row]:
    varied = {run.source: _varied_options([r for r in runs if r.source == run.source]) for run in runs}
    rows = []
    for run in runs:
        names = varied[run.source] if run.options else []
        options = {name: short(run.options.get(name)) for name in names}
        for decoder, figures in run.results["results"].items():
            method = f"{run.source}: {decoder}" if len(varied) > 1 else decoder
            predictions = read_scores(run.path, decoder, notes) if run.predictions is None else run.predictions[decoder]
            if not predictions:
                notes.append(f"{run.name}: no predictions of {decoder}, so it has no intervals.")
            elif len(predictions) < figures.get("num_prompts", 0):
                notes.append(
                    f"{run.name}: {decoder} was tested on {figures['num_prompts']} prompts, but its predictions files "
                    f"have {len(predictions)}; figures with intervals are based on these."
                )
            row = Row(
                name=method,
                decoder=decoder,
                method=method,
                run=run,
                figures=figures,
                mismatches=list((run.results.get("mismatches") or {}).get(decoder) or []),
                predictions=predictions,
                options=options,
            )
            rows.append(row)
    _make_labels_unique(rows)
    return rows


def _make_labels_unique(rows: Sequence[Row]) -> None:
    """Append the run's name to the names of rows with the same label."""
    labels = [row.label for row in rows]
    for row, label in zip(rows, labels, strict=True):
        if labels.count(label) > 1:
            row.name += f" [{row.run.name}]"


def read_scores(folder: Path, decoder: str, notes: list[str]) -> dict[str, ScoredPrediction]:
    """Return a decoder's predictions by prompt id, from the files of all processes.

    Scores that ``refusion-lit score`` wrote later for these very predictions take precedence over those of the test.
    A prompt that a distributed sampler repeated counts once.

    Args:
        folder: The run's directory.
        decoder: The decoder's name in the config.
        notes: Remarks for the reader are appended here: rescored files, lines that are not predictions.
    """
    pattern = re.compile(rf"predictions_{re.escape(decoder)}(_rank\d+)?(\.scored)?\.jsonl")
    paths = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    predictions: dict[str, ScoredPrediction] = {}
    for path in sorted(paths, key=lambda path: (not path.name.endswith(_SCORED), path.name)):
        if path.name.endswith(_SCORED):
            original = path.with_name(path.name.removesuffix(_SCORED) + ".jsonl")
            if original.exists() and (read_fingerprint(original) or {}) != (read_fingerprint(path) or {}):
                notes.append(f"{path.name} scores other predictions than those of {original.name} and was left out.")
                continue
            notes.append(f"{path.name}: the scores of {decoder} are those written by `refusion-lit score`.")
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    identity, prediction = _parse(json.loads(line))
                except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                    notes.append(f"{path.name}, line {number}: not a prediction, left out.")
                    continue
                predictions.setdefault(identity, prediction)
    return predictions


def scores_of(predictions: Iterable[Mapping[str, Any]]) -> dict[str, ScoredPrediction]:
    """Return predictions by prompt id, from the values that were written as lines."""
    return dict(map(_parse, predictions))


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
    )


def _read_object(path: Path) -> dict[str, Any]:
    values = read_json(path)
    return values if isinstance(values, dict) else {}
