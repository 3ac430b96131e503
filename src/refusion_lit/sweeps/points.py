"""From a sweep to its points: configs of plain values, identified by what they resolve to."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_lit.sweeps.spec import Sweep
from refusion_lit.utils.yaml_files import read_yaml

Config = dict[str, Any]
Resolve = Callable[[str, Config], Config]
"""Takes a subcommand and its config; returns the config with every default filled in, or raises ValueError."""

# Where a run lands says nothing about what it computes.
_PLACES = ("config", "runs_dir", "run_name", "run_version")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of options.

    Attributes:
        id: First 12 hexadecimal digits of the SHA-256 of the resolved configs.
        options: The varying options, as written in the sweep.
        configs: For each subcommand its resolved config.
    """

    id: str
    options: Config
    configs: dict[str, Config]

    @property
    def seed(self) -> Any:  # noqa: ANN401 - an int, or None
        """The runs' seed."""
        return next(iter(self.configs.values())).get("seed_everything")

    @property
    def label(self) -> str:
        """The varying options in a few words."""
        return " ".join(f"{name.rsplit('.', 1)[-1]}={short(value)}" for name, value in self.options.items()) or "base"


def short(value: Any, limit: int = 40) -> str:  # noqa: ANN401 - an option's value
    """Return a value in at most ``limit`` characters."""
    text = f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def plan(sweep: Sweep, directory: Path, resolve: Resolve) -> list[Point]:
    """Return a sweep's points, each once, in order.

    Args:
        sweep: The sweep.
        directory: What its paths are relative to: the sweep file's directory.
        resolve: See :data:`Resolve`.

    Raises:
        ValueError: If a file is missing or a point is wrong; names the point.
    """
    base: Config = {}
    for name in sweep.base:
        base = overlay(base, read_yaml(directory / name, "base"))
    points: dict[str, Point] = {}
    for options in sweep.combinations():
        try:
            point = _point(sweep, base, options, directory, resolve)
        except ValueError as error:
            text = ", ".join(f"{name}={short(value)}" for name, value in options.items()) or "base"
            raise ValueError(f"point {text}: {error}") from error
        points.setdefault(point.id, point)
    return list(points.values())


def _point(sweep: Sweep, base: Config, options: Config, directory: Path, resolve: Resolve) -> Point:
    configs = {}
    for subcommand in sweep.subcommands:
        config = copy.deepcopy(base)
        for name, value in {**sweep.options, **options}.items():
            scope, _, rest = name.partition(".")
            if scope in ("fit", "test"):
                if scope not in sweep.subcommands:
                    raise ValueError(f"{name}: expected a subcommand of this sweep ({sweep.subcommands}).")
                if scope != subcommand:
                    continue
                name = rest
            set_option(config, name, anchored(value, directory))
        resolved = resolve(subcommand, config)
        configs[subcommand] = {name: value for name, value in resolved.items() if name not in _PLACES}
    identity = {"configs": configs}
    if "fit" in configs:
        identity["test_checkpoint"] = sweep.test_checkpoint  # type: ignore[assignment]
    text = json.dumps(identity, sort_keys=True, default=str)
    return Point(id=hashlib.sha256(text.encode()).hexdigest()[:12], options=options, configs=configs)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Config:
    """Return one config over another; a component of another class replaces the one below it whole."""
    if above.get("class_path", below.get("class_path")) != below.get("class_path"):
        return dict(above)
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = overlay(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def set_option(config: Config, name: str, value: Any) -> None:  # noqa: ANN401 - an option's value
    """Set a dotted option in place; below a component (``class_path``) a plain name is one of its ``init_args``.

    Raises:
        ValueError: If the name leads through something that is no group of options.
    """
    node: Any = config
    *path, leaf = name.split(".")
    for i, part in enumerate(path):
        node = _inner(node, part)
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            elif isinstance(node[part], str):  # a component named by its class only
                node[part] = {"class_path": node[part]}
            node = node[part]
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{name}: expected a group of options at {'.'.join(path[: i + 1])}, got {node!r}.")
    node = _inner(node, leaf)
    if not isinstance(node, dict):
        raise ValueError(f"{name}: expected an option of a group, got an entry of a list.")
    if leaf == "class_path" and node.get("class_path") != value:
        node.pop("init_args", None)
    node[leaf] = value


def _inner(node: Any, part: str) -> Any:  # noqa: ANN401 - a node of a config
    if isinstance(node, dict) and "class_path" in node and part not in ("class_path", "init_args"):
        if node.get("init_args") is None:
            node["init_args"] = {}
        return node["init_args"]
    return node


def anchored(value: Any, directory: Path) -> Any:  # noqa: ANN401 - an option's value
    """Return a value with relative paths made absolute, and the YAML file of a component read."""
    if isinstance(value, dict):
        return {name: anchored(inner, directory) for name, inner in value.items()}
    if isinstance(value, list):
        return [anchored(inner, directory) for inner in value]
    if not isinstance(value, str) or not value.startswith(("./", "../")):
        return copy.copy(value)
    path = (directory / value).resolve()
    if path.suffix in (".yaml", ".yml"):
        component = read_yaml(path, "value")
        if "class_path" in component:
            return component
    return str(path)
