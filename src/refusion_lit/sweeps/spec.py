"""The definition of a sweep: which options vary, and over which values."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from refusion_lit.sweeps.launchers import Launcher, Local
from refusion_lit.utils.require import require, require_at_least

_DISTRIBUTIONS = ("uniform", "log_uniform", "integers", "choice")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A set of runs that differ in some options.

    The points are the product of ``entries``, the cells of ``grid`` and the samples of ``random``; an empty one counts
    as a single empty set of options. Options are dotted as on the command line (``model.sampling.temperature``,
    ``model.decoders.refusion.slot_size``); an option that starts with ``fit.`` or ``test.`` applies to that subcommand
    only. A value that starts with ``./`` or ``../`` is a path relative to the sweep file, and the path of a
    component's YAML file (such as those in ``configs/decoder``) stands for the component.

    Attributes:
        base: Config files, relative to the sweep file, merged in order. Unlike with repeated ``--config`` options of
            the command line, the named decoders of all files are kept.
        subcommands: ``[test]``, or ``[fit, test]`` to test the checkpoint of each fit.
        options: Options that all points share.
        grid: For each option the list of its values; all combinations are run.
        entries: A list of sets of options that change together.
        random: For each option a distribution: ``{uniform: [low, high]}``, ``{log_uniform: [low, high]}``,
            ``{integers: [low, high]}`` (both ends included) or ``{choice: [...]}``. A sample depends only on the seed,
            its number and the option's name, so adding samples or options leaves earlier samples unchanged.
        num_samples: Number of samples of ``random``.
        seed: Seed of ``random``. The seed of the runs is the option ``seed_everything``.
        test_checkpoint: Whether to test the ``last`` or the ``best`` checkpoint of a fit.
        launcher: How points are run: ``Local`` processes or ``Slurm`` jobs.
        directory: The sweep's directory; ``runs/sweep_NAME`` by default, where NAME is the sweep file's directory.
    """

    base: list[str] = field(default_factory=list)
    subcommands: list[Literal["fit", "test"]] = field(default_factory=lambda: ["test"])
    options: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    random: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_samples: int = 1
    seed: int = 0
    test_checkpoint: Literal["last", "best"] = "last"
    launcher: Launcher = field(default_factory=Local)
    directory: str | None = None

    def __post_init__(self) -> None:
        allowed = (["test"], ["fit", "test"])
        require(self.subcommands in allowed, "subcommands", "[test] or [fit, test]", self.subcommands, "choose one")
        for name, values in self.grid.items():
            is_list = isinstance(values, (list, tuple)) and len(values) > 0
            require(is_list, f"grid.{name}", "a list of at least one value", values, "write it as [VALUE, ...]")
        require_at_least("num_samples", self.num_samples, 1)
        for name, distribution in self.random.items():
            _check_distribution(name, distribution)
        places = {"grid": set(self.grid), "entries": {key for entry in self.entries for key in entry}}
        places |= {"random": set(self.random), "options": set(self.options)}
        for (first, names), (second, others) in itertools.combinations(places.items(), 2):
            if repeated := sorted(names & others):
                raise ValueError(
                    f"{repeated[0]}: expected in one place, got it in {first} and in {second}; remove one of them."
                )

    @property
    def swept(self) -> tuple[str, ...]:
        """Names of the options that vary."""
        return tuple(dict.fromkeys([*self.grid, *(key for entry in self.entries for key in entry), *self.random]))

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the swept options of each point, in a fixed order."""
        cells = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        samples = [self._sample(i) for i in range(self.num_samples)] if self.random else [{}]
        for parts in itertools.product(self.entries or [{}], cells, samples):
            yield {name: value for part in parts for name, value in part.items()}

    def _sample(self, index: int) -> dict[str, Any]:
        return {name: _draw(f"{self.seed}/{index}/{name}", kind) for name, kind in self.random.items()}


def _check_distribution(name: str, distribution: Mapping[str, Any]) -> None:
    kind, values = next(iter(distribution.items()), (None, None))
    if len(distribution) != 1 or kind not in _DISTRIBUTIONS or not isinstance(values, (list, tuple)) or not values:
        raise ValueError(
            f"random.{name}: expected one of {{uniform: [low, high]}}, {{log_uniform: [low, high]}}, "
            f"{{integers: [low, high]}}, {{choice: [...]}}, got {dict(distribution)!r}; write it as one of these."
        )
    if kind == "choice":
        return
    types = int if kind == "integers" else (int, float)
    are_numbers = len(values) == 2 and all(isinstance(v, types) and not isinstance(v, bool) for v in values)
    are_numbers = are_numbers and (kind == "integers" or _are_finite(values))
    in_range = are_numbers and values[0] <= values[1] and (kind != "log_uniform" or values[0] > 0)
    numbers = {"integers": "whole numbers", "log_uniform": "finite numbers above 0"}.get(kind, "finite numbers")
    expected = f"{kind}: [low, high] in {numbers}"
    require(in_range, f"random.{name}", expected, values, "change the bounds")


def _are_finite(bounds: Sequence[float]) -> bool:
    """Return whether floats can hold two bounds and what lies between them."""
    try:
        low, high = map(float, bounds)
    except OverflowError:  # an integer of hundreds of digits
        return False
    return math.isfinite(low) and math.isfinite(high) and math.isfinite(high - low)


def _draw(key: str, distribution: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an option's value
    generator = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    ((kind, values),) = distribution.items()
    if kind == "choice":
        return values[generator.randrange(len(values))]
    low, high = values
    if kind == "integers":
        return generator.randint(low, high)
    if kind == "uniform":
        return generator.uniform(low, high)
    return min(max(math.exp(generator.uniform(math.log(low), math.log(high))), low), high)
