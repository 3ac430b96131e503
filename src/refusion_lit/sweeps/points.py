"""The definition of a sweep, and its points: a resolved config per subcommand, identified by a hash of its values."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from refusion_lit.reports.results import short
from refusion_lit.sweeps.launchers import Launcher, Local
from refusion_lit.utils.files import digest, read_yaml
from refusion_lit.utils.require import require

Config = dict[str, Any]
Resolve = Callable[[str, Config], Config]
"""Takes a subcommand and its config; returns the config with every default filled in, or raises ValueError."""

# Options that say where a run is stored; they do not change what it computes.
_LOCATIONS = ("config", "runs_dir", "run_name", "run_version")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A set of runs that differ in some options.

    The points are the product of ``entries`` and the cells of ``grid``; an empty one counts as a single empty set of
    options. Options are dotted as on the command line (``model.sampling.temperature``,
    ``model.decoders.refusion.slot_size``); an option that starts with ``fit.`` or ``test.`` applies to that subcommand
    only. A value that starts with ``./`` or ``../`` is a path relative to the sweep file.

    Attributes:
        base: Config files, relative to the sweep file, merged in order. Unlike with repeated ``--config`` options of
            the command line, the named decoders of all files are kept.
        subcommands: ``[test]``, or ``[fit, test]`` to test the last checkpoint of each fit.
        options: Options that all points share.
        grid: For each option the list of its values; all combinations are run.
        entries: A list of sets of options that change together.
        launcher: How points are run: ``Local`` processes or ``Slurm`` jobs.
        directory: The sweep's directory; ``runs/sweep_NAME`` by default, where NAME is the sweep file's directory.
    """

    base: list[str] = field(default_factory=list)
    subcommands: list[Literal["fit", "test"]] = field(default_factory=lambda: ["test"])
    options: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    launcher: Launcher = field(default_factory=Local)
    directory: str | None = None

    def __post_init__(self) -> None:
        allowed = (["test"], ["fit", "test"])
        require(self.subcommands in allowed, "subcommands", "[test] or [fit, test]", self.subcommands, "choose one")
        for name, values in self.grid.items():
            is_list = isinstance(values, (list, tuple)) and len(values) > 0
            require(is_list, f"grid.{name}", "a list of at least one value", values, "write it as [VALUE, ...]")
        entries = {key for entry in self.entries for key in entry}
        places = {"grid": set(self.grid), "entries": entries, "options": set(self.options)}
        for (first, names), (second, others) in itertools.combinations(places.items(), 2):
            if repeated := sorted(names & others):
                raise ValueError(
                    f"{repeated[0]}: expected once, got it in {first} and in {second}; remove it from {second}."
                )

    @property
    def swept(self) -> tuple[str, ...]:
        """Names of the options that vary."""
        return tuple(dict.fromkeys([*self.grid, *(key for entry in self.entries for key in entry)]))

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the swept options of each point, in a fixed order."""
        for entry in self.entries or [{}]:
            for values in itertools.product(*self.grid.values()):
                yield {**entry, **dict(zip(self.grid, values, strict=True))}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of options.

    Attributes:
        id: First 12 hexadecimal digits of the SHA-256 of the resolved configs.
        options: The swept options, as written in the sweep.
        configs: The resolved config of each subcommand.
    """

    id: str
    options: Config
    configs: dict[str, Config]

    @property
    def seed(self) -> Any:  # noqa: ANN401 - an int, or None
        """Seed of the runs."""
        return next(iter(self.configs.values())).get("seed_everything")

    @property
    def label(self) -> str:
        """The swept options in short, without their groups."""
        return _format({name.rsplit(".", 1)[-1]: value for name, value in self.options.items()}, " ")


def plan(sweep: Sweep, directory: Path, resolve: Resolve) -> list[Point]:
    """Return the points of a sweep in order, without repetitions.

    Args:
        sweep: The sweep.
        directory: Directory of the sweep file, which the sweep's paths are relative to.
        resolve: See :data:`Resolve`.

    Raises:
        ValueError: If a file is missing or a point is invalid; the message names the point.
    """
    base: Config = {}
    for name in sweep.base:
        base = overlay(base, read_yaml(directory / name, "base"))
    points: dict[str, Point] = {}
    for options in sweep.combinations():
        try:
            point = _point(sweep, base, options, directory, resolve)
        except ValueError as error:
            raise ValueError(f"point {_format(options, ', ')}: {error}") from error
        points.setdefault(point.id, point)
    return list(points.values())


def _point(sweep: Sweep, base: Config, options: Config, directory: Path, resolve: Resolve) -> Point:
    configs = {}
    for subcommand in sweep.subcommands:
        config = copy.deepcopy(base)
        for name, value in sorted({**sweep.options, **options}.items(), key=lambda item: _depth(item[0])):
            scope, _, rest = name.partition(".")
            if scope in ("fit", "test"):
                expected = f"a subcommand of this sweep ({sweep.subcommands})"
                fix = "remove the option or add the subcommand"
                require(scope in sweep.subcommands, name, expected, scope, fix)
                if scope != subcommand:
                    continue
                name = rest
            if name == "seed_everything":  # goes before those of the base: a run's config names all options
                for group in (config.get("model"), config.get("data")):
                    if isinstance(group, dict):
                        group.pop("seed", None)
            set_option(config, name, _resolve_path(value, directory))
        resolved = resolve(subcommand, config)
        configs[subcommand] = {name: value for name, value in resolved.items() if name not in _LOCATIONS}
    return Point(id=digest(configs)[:12], options=options, configs=configs)


def _depth(name: str) -> int:
    """Return the sort key that puts a component before its own options, which it would otherwise replace."""
    return sum(part not in ("fit", "test", "init_args") for part in name.split("."))


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Config:
    """Merge two configs; ``above`` takes precedence, and a component of another class replaces that below it."""
    if above.get("class_path", below.get("class_path")) != below.get("class_path"):
        return dict(above)
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = overlay(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def set_option(config: Config, name: str, value: Any) -> None:  # noqa: ANN401 - an option's value
    """Set a dotted option in place; inside a component (``class_path``) a plain name is one of its ``init_args``.

    Raises:
        ValueError: If a part of the name is no group of options.
    """
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        if "class_path" in config and part not in ("class_path", "init_args"):
            if config.get("init_args") is None:
                config["init_args"] = {}
            config = config["init_args"]
        if number == len(parts):
            config[part] = value
            return
        group = {} if config.get(part) is None else config[part]
        config[part] = {"class_path": group} if isinstance(group, str) else group  # given by its class name only
        expected = f"a group of options at {'.'.join(parts[:number])}"
        require(isinstance(config[part], dict), name, expected, group, "correct the name")
        config = config[part]


def _resolve_path(value: Any, directory: Path) -> Any:  # noqa: ANN401 - an option's value
    """Make a path that starts with ``./`` or ``../`` absolute, and copy other values."""
    is_path = isinstance(value, str) and value.startswith(("./", "../"))
    return str((directory / value).resolve()) if is_path else copy.deepcopy(value)


def _format(options: Config, separator: str) -> str:
    """Return options as ``name=value``; a sweep without swept options has the one point ``base``."""
    return separator.join(f"{name}={short(value)}" for name, value in options.items()) or "base"
