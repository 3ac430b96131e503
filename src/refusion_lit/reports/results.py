"""Reads the files that describe a run: ``results.json``, ``config.yaml`` and ``environment.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.reports.environment import FILE_NAME as ENVIRONMENT

RESULTS = "results.json"
CONFIG = "config.yaml"
_KINDS = {
    ("batch_size",): int, ("sampling",): dict, ("fingerprints",): dict, ("config",): dict, ("mismatches",): dict,
    ("environment",): dict, ("environment", "git"): dict, ("environment", "packages"): dict,
    ("environment", "hardware"): dict, ("environment", "hardware", "devices"): list,
}  # fmt: skip
"""The fields beside the figures that are read again, each after what it lies in; any of them may be missing or null."""
_IN_WORDS = {int: "an integer", dict: "a mapping", list: "a list of texts"}
_MAX_TEXT_LENGTH = 2000
_NUM_KEPT = 100
"""Longer texts of a config are cut to this many characters: a stored tokenizer's files have millions."""


def read_results(path: Path) -> dict[str, Any] | None:
    """Return the content of a ``results.json``; ``None`` if another program wrote the file.

    Raises:
        ValueError: If the file cannot be read, or a field of ours is of another type.
    """
    values = _read(path)
    figures = values.get("results") if isinstance(values, dict) else None
    is_ours = (
        isinstance(figures, dict) and figures and all(isinstance(f, dict) and "score" in f for f in figures.values())
    )
    if not is_ours:
        return None
    _check_kinds(values, path)
    return values


def _check_kinds(values: Mapping[str, Any], path: Path) -> None:
    """Refuse fields of another type than ``test`` writes; a file may have been mended by hand.

    Raises:
        ValueError: If there is one, with its name.
    """
    kinds: dict[tuple[str, ...], type] = dict(_KINDS)
    kinds |= {("results", name, "num_prompts"): int for name in values["results"]}
    kinds |= {("mismatches", name): list for name in values["results"]}
    for names, kind in kinds.items():
        value: Any = values
        for name in names:
            value = value.get(name) if value is not None else None
        of_kind = isinstance(value, kind) and not isinstance(value, bool)
        if isinstance(value, list):
            of_kind = of_kind and all(isinstance(each, str) for each in value)
        if value is not None and not of_kind:
            raise ValueError(
                f"{path}: {'.'.join(names)}: expected {_IN_WORDS[kind]}, got {value!r:.80}; correct the field, or run "
                "`refusion-lit test` again."
            )


def read_environment(directory: Path) -> dict[str, Any] | None:
    """Return the environment recorded in a run's directory; ``None`` if there is none.

    Raises:
        ValueError: If the file is damaged.
    """
    return _read_object(directory / ENVIRONMENT)


def read_config(directory: Path) -> dict[str, Any] | None:
    """Return the resolved config in a run's directory, with long texts cut; ``None`` if there is none.

    Raises:
        ValueError: If the file is damaged.
    """
    config = _read_object(directory / CONFIG)
    return None if config is None else shortened(config)


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    values = _read(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping, got {type(values).__name__}; restore the file or remove it.")
    return values


def _read(path: Path) -> Any:  # noqa: ANN401 - JSON or YAML
    try:
        text = path.read_text(encoding="utf-8")
        return yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); restore the file or remove it.") from error


def shortened(value: Any) -> Any:  # noqa: ANN401 - YAML
    """Return a config with its long texts cut."""
    if isinstance(value, dict):
        return {name: shortened(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner) for inner in value]
    if isinstance(value, str) and len(value) > _MAX_TEXT_LENGTH:
        return f"{value[:_NUM_KEPT]} ... ({len(value)} characters)"
    return value
