"""What a sweep is: which options vary, and over which values."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refusion_lit.sweeps.launchers import Launcher, Local

_KINDS = {"uniform": 2, "log_uniform": 2, "integers": 2, "choice": None}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A set of runs that differ in some options.

    The points are all combinations of a cell of ``grid``, one of ``entries`` and a sample of ``random``; what is
    left out counts as one empty entry. Options are dotted as on the command line (``model.sampling.temperature``,
    ``model.decoders.refusion.slot_size``); one that begins with ``fit.`` or ``test.`` goes to that subcommand alone.
    A value that begins with ``./`` or ``../`` is a path relative to the sweep file, and one that names a YAML file
    of one component (those in ``configs/decoder``) stands for that component.

    Attributes:
        base: Config files, relative to the sweep file. Later ones overlay earlier ones group by group: named decoders
            add up, where ``--config A --config B`` of the command line keeps those of the last file alone.
        subcommands: ``[test]``, or ``[fit, test]`` where the test takes the fit's checkpoint.
        options: Options that all points share.
        grid: For each option the values to combine.
        entries: A list of sets of options, each of which changes together.
        random: For each option ``{uniform: [low, high]}``, ``{log_uniform: [low, high]}``, ``{integers: [low, high]}``
            (both included) or ``{choice: [...]}``. A sample depends on the seed, its number and the option's name
            only: more samples, or another option, leave the earlier samples as they are.
        num_samples: Samples of ``random``.
        seed: Seed of ``random``. The runs' own seed is the option ``seed_everything``.
        test_checkpoint: Which checkpoint of ``fit`` is tested.
        launcher: How points are run.
        directory: Where everything goes; ``runs/sweep_NAME`` by default, after the sweep file's folder.
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
        if self.subcommands not in (["test"], ["fit", "test"]):
            raise ValueError(f"subcommands: expected [test] or [fit, test], got {self.subcommands}.")
        for name, values in self.grid.items():
            if not isinstance(values, (list, tuple)) or not values:
                raise ValueError(f"grid.{name}: expected a list of at least one value, got {values!r}.")
        if self.num_samples < 1:
            raise ValueError(f"num_samples: expected at least 1, got {self.num_samples}.")
        for name, distribution in self.random.items():
            _check(name, distribution)
        places = {"grid": set(self.grid), "entries": {key for entry in self.entries for key in entry}}
        places |= {"random": set(self.random), "options": set(self.options)}
        for (one, left), (other, right) in itertools.combinations(places.items(), 2):
            if twice := left & right:
                name = sorted(twice)[0]
                raise ValueError(f"{name}: expected in one place, got it in {one} and in {other}; drop one of them.")

    @property
    def swept(self) -> tuple[str, ...]:
        """Names of the options that vary."""
        return tuple(dict.fromkeys([*self.grid, *(key for entry in self.entries for key in entry), *self.random]))

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the varying options of each point, in a fixed order."""
        cells = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        samples = [self._sample(i) for i in range(self.num_samples)] if self.random else [{}]
        for parts in itertools.product(self.entries or [{}], cells, samples):
            yield {name: value for part in parts for name, value in part.items()}

    def _sample(self, index: int) -> dict[str, Any]:
        return {name: _draw(f"{self.seed}/{index}/{name}", kind) for name, kind in self.random.items()}


def _check(name: str, distribution: Mapping[str, Any]) -> None:
    kind, values = next(iter(distribution.items()), (None, None))
    if len(distribution) != 1 or kind not in _KINDS or not isinstance(values, (list, tuple)) or not values:
        raise ValueError(
            f"random.{name}: expected one of {{uniform: [low, high]}}, {{log_uniform: [low, high]}}, "
            f"{{integers: [low, high]}}, {{choice: [...]}}, got {dict(distribution)!r}."
        )
    if kind == "choice":
        return
    numbers = len(values) == 2 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    if not numbers or not values[0] <= values[1] or (kind == "log_uniform" and values[0] <= 0):
        above = " above 0" if kind == "log_uniform" else ""
        raise ValueError(f"random.{name}: expected {kind}: [low, high] in numbers{above}, got {values!r}.")


def _draw(key: str, distribution: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an option's value
    generator = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    ((kind, values),) = distribution.items()
    if kind == "choice":
        return values[generator.randrange(len(values))]
    low, high = values
    if kind == "integers":
        return generator.randint(int(low), int(high))
    if kind == "uniform":
        return generator.uniform(low, high)
    return min(max(math.exp(generator.uniform(math.log(low), math.log(high))), low), high)
