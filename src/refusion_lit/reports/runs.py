"""Reads what ``test`` and ``sweep`` left in their folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.reports.environment import config_of


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One line of a predictions file, as far as a report needs it. ``score`` is in [0, 1]."""

    prompt: str
    response: str
    reference: str | None
    score: float
    num_tokens: int
    num_forwards: int


@dataclass(kw_only=True)
class Run:
    """One ``results.json`` and what lies beside it.

    Attributes:
        path: Its folder.
        name: The folder's name below the argument that led to it.
        source: A name of that argument, unique among the arguments.
        results: The content of ``results.json``.
        environment: Versions, seed, hardware, git state and command, as far as they were recorded.
        config: The resolved config as YAML; empty where none was kept.
        options: What a sweep varied at this point; empty outside a sweep.
    """

    path: Path
    name: str
    source: str
    results: dict[str, Any]
    environment: dict[str, Any]
    config: str
    options: dict[str, Any]

    @property
    def batch_size(self) -> int | None:
        """The most prompts that could share a call."""
        return self.results.get("batch_size", self.results.get("max_batch_size"))


@dataclass(kw_only=True)
class Row:
    """One decoder of one run: a row of the comparison.

    Attributes:
        label: Its name in the report, unique there.
        decoder: Its name in the config.
        method: Rows of the same method are points of one curve.
        run: Where it comes from.
        figures: What ``test`` computed.
        mismatches: Why the model was not trained for the decoder; empty if it was.
        predictions: Predictions by prompt id; empty where no file was kept.
    """

    label: str
    decoder: str
    method: str
    run: Run
    figures: dict[str, Any]
    mismatches: list[str]
    predictions: dict[str, Prediction]


@dataclass(kw_only=True)
class Collection:
    """Everything that a report is made from.

    Attributes:
        runs: The runs, in the order of their paths.
        rows: The decoders of all runs.
        notes: What a reader should know: files that were missing or cut short, points that failed.
    """

    runs: list[Run]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def read_runs(paths: Sequence[str | Path]) -> Collection:
    """Read every run in or below some folders.

    Args:
        paths: Folders of runs or sweeps, or files ``results.json``, beside and below which nothing is looked for.

    Raises:
        ValueError: If one does not exist or holds no results.
    """
    notes: list[str] = []
    runs: list[Run] = []
    folders = [path.parent if path.is_file() else path for path in map(Path, paths)]
    names = [_name(folder) for folder in folders]
    if len(set(names)) < len(names):  # folders of the same name in different places
        names = [str(folder) for folder in folders]
    for name, argument in zip(names, map(Path, paths), strict=True):
        if argument.is_file():
            files, folder = [argument], argument.parent
        elif argument.is_dir():
            files, folder = sorted(argument.rglob("results.json")), argument
            notes += _failed_points(argument)
        else:
            raise ValueError(f"RUN: expected a folder of a run or a sweep, got {argument}, which is none; name one.")
        found = [run for path in files if (run := _read_run(path, folder, name, notes))]
        if not found:
            raise ValueError(
                f"RUN: expected results.json of a finished `test` in or below {argument}, got none; "
                f"run `refusion-lit test` there first."
            )
        runs += found
    unique = {run.path.resolve(): run for run in runs}
    runs = list(unique.values())
    return Collection(runs=runs, rows=_rows(runs, notes), notes=notes)


def varied_options(runs: Sequence[Run]) -> list[str]:
    """Return the options that differ between the points of a sweep; runs outside any sweep have none."""
    runs = [run for run in runs if run.options]
    names = dict.fromkeys(name for run in runs for name in run.options)
    return [name for name in names if len({json.dumps(run.options.get(name), default=str) for run in runs}) > 1]


def _read_run(path: Path, argument: Path, source: str, notes: list[str]) -> Run | None:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        notes.append(f"{path} could not be read and was left out.")
        return None
    if not isinstance(results, dict) or not _is_table(results.get("results")):
        return None  # another program's file of the same name
    folder = path.parent
    environment = results.get("environment") or _read_json(folder / "environment.json")
    config = results.get("config") or config_of(folder)
    relative = folder.relative_to(argument)
    return Run(
        path=folder,
        name=str(relative) if relative.parts else argument.resolve().name,
        source=source,
        results=results,
        environment=environment,
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else "",
        options=_point_options(folder, argument),
    )


def _is_table(values: object) -> bool:
    return (
        isinstance(values, dict) and bool(values) and all(isinstance(v, dict) and "score" in v for v in values.values())
    )


def _name(argument: Path) -> str:
    """Name a run so that ``runs/NAME/version_0`` is told from another run's first version."""
    path = argument.resolve()
    return f"{path.parent.name}/{path.name}" if re.fullmatch(r"version_\d+", path.name) else path.name


def _point_options(folder: Path, argument: Path) -> dict[str, Any]:
    """Return what a sweep set at the point that a folder belongs to."""
    for candidate in (folder, *folder.parents):
        options = _read_json(candidate / "point.json").get("options")
        if isinstance(options, dict):
            return options
        if candidate == argument:
            break
    return {}


def _failed_points(argument: Path) -> list[str]:
    notes = []
    for path in sorted(argument.rglob("outcome.json")):
        outcome = _read_json(path)
        if outcome.get("status") == "failed":
            point = _read_json(path.parent / "point.json").get("options") or path.parent.name
            error = str(outcome.get("error") or "no reason recorded").strip().splitlines()
            notes.append(f"A point of the sweep failed and is not shown ({_pairs(point)}): {error[-1]}")
    return notes


def _rows(runs: Sequence[Run], notes: list[str]) -> list[Row]:
    varied = {run.source: varied_options([r for r in runs if r.source == run.source]) for run in runs}
    several_sources = len({run.source for run in runs}) > 1
    rows = []
    for run in runs:
        for decoder, figures in run.results["results"].items():
            method = f"{run.source}: {decoder}" if several_sources else decoder
            label = method
            if run.options and varied[run.source]:
                label += f" ({_pairs({name: run.options.get(name) for name in varied[run.source]})})"
            predictions = _read_predictions(run.path, decoder, notes)
            if not predictions:
                notes.append(f"{run.name}: no predictions of {decoder}, so no intervals for it.")
            elif len(predictions) < figures.get("num_prompts", 0):
                notes.append(
                    f"{run.name}: {decoder} was tested on {figures['num_prompts']} rows, its predictions have "
                    f"{len(predictions)} prompts; figures with intervals are of these."
                )
            mismatches = list(run.results.get("mismatches", {}).get(decoder) or [])
            rows.append(
                Row(
                    label=label,
                    decoder=decoder,
                    method=method,
                    run=run,
                    figures=figures,
                    mismatches=mismatches,
                    predictions=predictions,
                )
            )
    _make_unique(rows)
    return rows


def _make_unique(rows: Sequence[Row]) -> None:
    """Add the run's name, and a number where that is not enough, to labels that would be the same."""
    for suffix in ("run", "number"):
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.label] = counts.get(row.label, 0) + 1
        seen: dict[str, int] = {}
        for row in rows:
            label = row.label
            if counts[label] > 1:
                seen[label] = seen.get(label, 0) + 1
                row.label = f"{label} [{row.run.name}]" if suffix == "run" else f"{label} #{seen[label]}"


def _read_predictions(folder: Path, decoder: str, notes: list[str]) -> dict[str, Prediction]:
    """Return predictions by id from all processes' files; a prompt that a sampler repeated counts once.

    What ``refusion-lit score`` has written beside them goes before the scores of the test.
    """
    pattern = re.compile(rf"predictions_{re.escape(decoder)}(_rank\d+)?(\.scored)?\.jsonl")
    paths = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    predictions: dict[str, Prediction] = {}
    for path in sorted(paths, key=lambda path: (path.suffixes[:-1] != [".scored"], path.name)):
        if path.suffixes[:-1] == [".scored"]:
            notes.append(f"{path.name}: scores of {decoder} are those that `refusion-lit score` gave afterwards.")
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    identity, value = _prediction(json.loads(line))
                except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                    notes.append(f"{path.name}, line {number}: not a prediction, left out.")
                    continue
                predictions.setdefault(identity, value)
    return dict(sorted(predictions.items()))


def _prediction(values: Mapping[str, Any]) -> tuple[str, Prediction]:
    score = float(values["score"] or 0.0)  # as in the metrics contract
    if not 0 <= score <= 1:
        raise ValueError(f"score: expected a number in [0, 1], got {score}")
    num_tokens, num_forwards = int(values["num_tokens"]), int(values["num_forwards"])
    if not (0 <= num_tokens < 2**53 and 0 <= num_forwards < 2**53):
        raise ValueError(f"num_tokens, num_forwards: expected counts, got {num_tokens} and {num_forwards}")
    texts = [str(values[key]) for key in ("id", "prompt", "response")] + [str(values.get("reference"))]
    "".join(texts).encode()  # half a surrogate pair could not be written
    return str(values["id"]), Prediction(
        prompt=str(values["prompt"]),
        response=str(values["response"]),
        reference=None if values.get("reference") is None else str(values["reference"]),
        score=score,
        num_tokens=num_tokens,
        num_forwards=num_forwards,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _pairs(options: object) -> str:
    """Name options in short: ``slot_size=4, slot_threshold=0.9``."""
    if not isinstance(options, dict):
        return str(options)
    return ", ".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in options.items())
