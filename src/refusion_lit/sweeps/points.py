"""A sweep's definition, and its points with resolved configs, named by a hash."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from refusion_lit.reports.results import format_options, shorten_value
from refusion_lit.sweeps.launchers import Launcher, Local
from refusion_lit.types import LatencyOptions
from refusion_lit.utils.files import digest, read_yaml
from refusion_lit.utils.require import require

Config = dict[str, Any]
Resolve = Callable[[str, Config, Config], Config]
"""Takes a subcommand, a config, and options by dotted name that replace the config's options.

Returns the config with every default filled in, or raises ValueError.
"""

# Options for the place where a run is stored; they do not change results.
_LOCATIONS = ("config", "runs_dir", "run_name", "run_version")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs that differ in some options.

    The points combine every entry in ``entries`` with every cell in ``grid``. An empty list or grid adds no options.
    Options are dotted as on the command line (``model.sampling.temperature``,
    ``model.decoders.refusion.slot_size``). An option that starts with ``fit.`` or ``test.`` applies to that subcommand
    only. A value that starts with ``./`` or ``../`` is a path relative to the sweep file.

    Attributes:
        base: Config files, relative to the sweep file, merged in order. Unlike with repeated ``--config`` options on
            the command line, named decoders from all files are kept.
        subcommands: ``[test]``, or ``[fit, test]`` to test the fits' last checkpoints.
        options: Options that all points share.
        grid: Value lists by option; all combinations are run.
        entries: Mappings of options that change together.
        launcher: Runs the points: ``Local`` processes or ``Slurm`` jobs.
        directory: The sweep's directory; ``runs/sweep_NAME`` by default, where NAME is the sweep file's directory.
        description: A line to print first, for example the sweep's purpose and duration.
        latency: Options for measuring speeds. After all points have run, every decoder is timed on its model, in turns
            and in one process. ``None``: speeds are not measured.

    Examples:
        >>> sweep = Sweep(grid={"slot_size": [4, 8]}, entries=[{"seed": 0}, {"seed": 1}])
        >>> list(sweep.combinations())[:2]
        [{'seed': 0, 'slot_size': 4}, {'seed': 0, 'slot_size': 8}]
    """

    base: list[str] = field(default_factory=list)
    subcommands: list[str] = field(default_factory=lambda: ["test"])
    options: Config = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    entries: list[Config] = field(default_factory=list)
    launcher: Launcher = field(default_factory=Local)
    directory: str | None = None
    description: str | None = None
    latency: LatencyOptions | None = None

    def __post_init__(self) -> None:
        allowed = (["test"], ["fit", "test"])
        require(self.subcommands in allowed, "subcommands", "[test] or [fit, test]", self.subcommands, "choose one")
        for name, values in self.grid.items():
            require(len(values) > 0, f"grid.{name}", "a list of at least one value", values, "write it as [VALUE, ...]")
        entries = {name for entry in self.entries for name in entry}
        places = {"grid": set(self.grid), "entries": entries, "options": set(self.options)}
        for name in sorted(set().union(*places.values())):
            first, *others = [place for place, names in places.items() if name in names]
            if others:
                raise ValueError(
                    f"{name}: expected once, got it in {first} and in {others[0]}; remove it from {others[0]}."
                )

    def override(self, options: Config) -> Sweep:
        """Return the sweep with other options; a list goes to the grid."""

        def without(values: Config) -> Config:
            return {name: value for name, value in values.items() if name not in options}

        lists = {name: values for name, values in options.items() if isinstance(values, list)}
        shared = without(self.options) | {name: value for name, value in options.items() if name not in lists}
        entries = [entry for entry in map(without, self.entries) if entry]
        return replace(self, options=shared, grid=without(self.grid) | lists, entries=entries)

    @property
    def option_names(self) -> tuple[str, ...]:
        """Names of varying options."""
        return tuple(dict.fromkeys([*self.grid, *(name for entry in self.entries for name in entry)]))

    def combinations(self) -> Iterator[Config]:
        """Yield the varying options per point, in a fixed order."""
        for entry in self.entries or [{}]:
            for values in itertools.product(*self.grid.values()):
                yield {**entry, **dict(zip(self.grid, values, strict=True))}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point in a sweep.

    Attributes:
        id: First 12 hexadecimal digits of the resolved configs' SHA-256.
        options: The varying options, as written in the sweep.
        configs: The resolved configs by subcommand.
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
        """The varying options in short, without their groups."""
        return format_options(self.options) or "base"


def plan(sweep: Sweep, directory: Path, resolve: Resolve) -> list[Point]:
    """Return a sweep's points in order, without repetitions.

    Args:
        sweep: The sweep.
        directory: The sweep file's directory. The sweep's paths are relative to it.
        resolve: See :data:`Resolve`.

    Raises:
        ValueError: If a file is missing or a point is invalid; the message names the point.
    """
    base = reduce(overlay, (read_yaml(directory / name, "base") for name in sweep.base), {})
    points: dict[str, Point] = {}
    for options in sweep.combinations():
        try:
            configs = {
                name: _resolve_point(sweep, name, base, options, directory, resolve) for name in sweep.subcommands
            }
        except ValueError as error:
            named = ", ".join(f"{name}={shorten_value(value)}" for name, value in options.items())
            raise ValueError(f"point {named or 'base'}: {error}") from error
        point = Point(id=digest(configs)[:12], options=options, configs=configs)
        points.setdefault(point.id, point)
    return list(points.values())


def _resolve_point(
    sweep: Sweep, subcommand: str, base: Config, options: Config, directory: Path, resolve: Resolve
) -> Config:
    """Resolve a subcommand's config at a point."""
    chosen: Config = {}
    for name, value in {**sweep.options, **options}.items():
        scope, _, rest = name.partition(".")
        if scope in ("fit", "test"):
            expected = f"a subcommand of this sweep ({sweep.subcommands})"
            fix = "remove the option or add the subcommand"
            require(scope in sweep.subcommands, name, expected, scope, fix)
            if scope != subcommand:
                continue
            name = rest
        is_path = isinstance(value, str) and value.startswith(("./", "../"))
        chosen[name] = str((directory / value).resolve()) if is_path else value
        base = _without(base, name)
    # Sorted, a component comes before its options, which the component would otherwise replace.
    resolved = resolve(subcommand, base, dict(sorted(chosen.items())))
    return {name: value for name, value in resolved.items() if name not in _LOCATIONS}


def _without(config: Config, name: str) -> Config:
    """Return a config without a dotted option, because the parser keeps options of a component whose class stays."""
    first, _, rest = name.partition(".")
    if not isinstance(config, dict) or first not in config:
        return config
    kept = {key: value for key, value in config.items() if key != first}
    return {**kept, first: _without(config[first], rest)} if rest else kept


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Config:
    """Merge two configs; ``above`` takes precedence, and replaces a component with another class as a whole."""
    if above.get("class_path", below.get("class_path")) != below.get("class_path"):
        return dict(above)
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = overlay(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
