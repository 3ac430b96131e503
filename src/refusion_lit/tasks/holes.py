"""Holes: lists of sums or records in which one value of each row is left out, and the text around it is given.

The query ``12+?,?+78>`` goes with the response ``12+__=46;__+78=134;``, whose blanks are ``34`` and ``56``: the right
side of a hole says what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from refusion_lit.tasks.arithmetic import Additions
from refusion_lit.tasks.base import GeneratedTask, LazyExamples, Split, Task
from refusion_lit.tasks.records import Records
from refusion_lit.types import Example
from refusion_lit.utils.keys import stable_key
from refusion_lit.utils.require import require

_ROW_LENGTH = 3  # both tasks have three values in a row
_VALUES: dict[type[Task], re.Pattern[str]] = {
    Additions: re.compile(r"\d+"),
    Records: re.compile(r'(?<=":")\w+|(?<=":)\d+'),
}


@dataclass(frozen=True, kw_only=True)
class Holes(Task):
    """Sums or records with one value of each row left out, chosen at random; its examples are those of ``task``.

    In sums the query shows ``?`` for an operand that is left out, so that only the given result determines it. The
    query of records stays as it is. Either way there is one right answer.

    Attributes:
        task: The task whose responses get holes, ``Additions`` or ``Records``.
    """

    task: GeneratedTask = field(default_factory=Additions)

    def __post_init__(self) -> None:
        """Refuse a task whose values are unknown here."""
        names = " or ".join(task.__name__ for task in _VALUES)
        require(type(self.task) in _VALUES, "task.task", names, type(self.task).__name__, "choose one of them")

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split as a lazy sequence, each with the character ranges of its holes.

        Args:
            split: The split.
        """
        return LazyExamples(size=self.task.size(split), make=partial(self._example, split))

    def _example(self, split: Split, index: int) -> Example:
        return self.with_holes(self.task.example(split, index))

    def with_holes(self, example: Example) -> Example:
        """Return an example of ``task`` with a hole in each row."""
        rng = Random(stable_key("holes", self.task.seed, example.query))
        values = [match.span() for match in _VALUES[type(self.task)].finditer(example.response)]
        rows = [values[start : start + _ROW_LENGTH] for start in range(0, len(values), _ROW_LENGTH)]
        chosen = [rng.randrange(_ROW_LENGTH) for _ in rows]
        query = example.query
        if isinstance(self.task, Additions):
            numbers = re.findall(r"\d+", query)
            shown = [["?" if i == hidden else numbers[2 * row + i] for i in range(2)]
                     for row, hidden in enumerate(chosen)]  # fmt: skip
            query = ",".join(["+".join(pair) for pair in shown]) + ">"
        holes = tuple(row[hidden] for row, hidden in zip(rows, chosen, strict=True))
        return replace(example, query=query, holes=holes)

    def score(self, example: Example, response: str) -> float | None:
        """Return 1 for the right values in the given text, else 0; the task's own rules decide what is equal."""
        return self.task.score(example, response)

    def characters(self) -> str:
        """Return the task's characters and the question mark."""
        return "".join(sorted({*(self.task.characters() or ()), "?"}))
