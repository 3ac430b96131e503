"""Tasks whose responses are programs, scored by running them."""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import comb

from refusion_lit.sandbox import Level, Limits, Outcome, Sandbox
from refusion_lit.tasks.base import Split, Task
from refusion_lit.tasks.files import InstructionFiles
from refusion_lit.tasks.readers import Row
from refusion_lit.types import Example

_FENCED = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:\r?\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class CodeTask(Task):
    """Problems from a file or a hub data set; a response passes if its program passes the problem's tests.

    Running what a model wrote is off unless ``allow_code_execution``: without it every score is missing, and
    ``refusion-lit score`` gives it later from the predictions file.

    Attributes:
        files: The benchmark's file or files (JSON, JSONL, also ``.gz``, or Parquet).
        dataset: Id of a hub data set in their place (``pip install refusion-lit[data]``).
        dataset_name: Its configuration.
        dataset_revision: Its pinned revision.
        num_samples: Responses asked for each problem, for pass@k; with 2 or more use a temperature above 0.
        allow_code_execution: Run the responses' programs on this machine.
        minimum_isolation: Refuse to run them with less: resource ``limits`` alone, no ``files`` outside, or ``full``
            (also no network and no processes).
        limits: What one run may use.
    """

    files: list[str] | str | None = None
    dataset: str | None = None
    dataset_name: str | None = None
    dataset_revision: str | None = None
    num_samples: int = 1
    allow_code_execution: bool = False
    minimum_isolation: Level = "full"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Refuse options that say nothing or contradict each other."""
        if (self.files is None) == (self.dataset is None):
            raise ValueError(
                "task.files: expected either files or a hub data set in task.dataset, got "
                f"{'neither' if self.files is None else 'both'}; give one of them."
            )
        if self.num_samples < 1:
            raise ValueError(f"task.num_samples: expected an integer of at least 1, got {self.num_samples}; raise it.")
        Sandbox(minimum=self.minimum_isolation)  # checks the name

    @abstractmethod
    def read(self, row: Row) -> tuple[Split, Example]:
        """Turn a row into an example, whose id names the problem, and tell its split.

        Raises:
            ValueError: If a field is missing, naming file and line.
        """

    @abstractmethod
    def program(self, example: Example, response: str) -> tuple[str, str]:
        """Return the program that a response makes, and its tests."""

    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples; in the test split each problem ``num_samples`` times, for pass@k."""
        found = self._problems[split]
        if split != "test" or self.num_samples == 1:
            return found
        return [
            Example(id=f"{e.id}#{number}", query=e.query, response=e.response, meta=e.meta)
            for e in found
            for number in range(self.num_samples)
        ]

    def score(self, example: Example, response: str) -> float | None:
        """Return 1 if the response's program passes the tests, else 0; ``None`` where running it is not allowed."""
        if self.allow_code_execution:
            return float(self.run(example, response).passed)
        _ = self._said_unscored
        return None

    def run(self, example: Example, response: str) -> Outcome:
        """Run a response's program with its problem's tests.

        Raises:
            ValueError: If this is not allowed, or the machine's isolation is too weak.
        """
        if not self.allow_code_execution:
            raise ValueError(
                "allow_code_execution: expected true, because scoring runs programs that a model wrote on this "
                "machine, got false; add --allow_code_execution if you want that."
            )
        return self.sandbox.run(*self.program(example, response))

    @cached_property
    def sandbox(self) -> Sandbox:
        """What programs run in; says at its first use what isolation it found."""
        sandbox = Sandbox(limits=self.limits, minimum=self.minimum_isolation)
        sys.stderr.write(f"isolation of generated code: {sandbox.isolation.describe()}\n")
        return sandbox

    @cached_property
    def _said_unscored(self) -> bool:
        """Say once that scores are missing."""
        sys.stderr.write(
            f"{type(self).__name__}: programs are not run without allow_code_execution; scores are missing (0 in "
            "tables) until `refusion-lit score` gives them.\n"
        )
        return True

    @cached_property
    def _problems(self) -> Mapping[Split, list[Example]]:
        problems: dict[Split, list[Example]] = {"train": [], "validation": [], "test": []}
        source = InstructionFiles(
            train=self.files,
            dataset=self.dataset,
            dataset_name=self.dataset_name,
            dataset_revision=self.dataset_revision,
        )
        seen: set[str] = set()
        for row in source.rows():
            if row.values is None:
                raise ValueError(f"{row.where}: {row.error}; mend the line.")
            split, example = self.read(row)
            if example.id in seen:
                raise ValueError(f"{row.where}: expected each problem once, got {example.id} again; remove one.")
            seen.add(example.id)
            problems[split].append(example)
        return problems


def code_of(response: str) -> str:
    """Return the code of a response: its longest fenced block that names Python or nothing, else all of it."""
    blocks = [match[1] for match in _FENCED.finditer(response)]
    return max(blocks, key=len) if blocks else response


def problem_of(identity: str) -> str:
    """Return the problem that one of several samples belongs to."""
    return identity.rsplit("#", 1)[0]


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate, without bias, the probability that one of ``k`` samples passes.

    It is the share of the subsets of ``k`` samples in which at least one passes (Chen et al., arXiv 2107.03374,
    equation 1), computed from whole numbers.

    Args:
        num_samples: Samples drawn, at least ``k``.
        num_passed: Samples that passed, from 0 to ``num_samples``.
        k: At least 1.

    Raises:
        ValueError: If there are fewer samples than ``k``, or a number is impossible.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k: expected an integer from 1 to {num_samples} (the samples), got {k}; draw more samples.")
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed: expected an integer from 0 to {num_samples}, got {num_passed}.")
    subsets = comb(num_samples, k)
    return (subsets - comb(num_samples - num_passed, k)) / subsets
