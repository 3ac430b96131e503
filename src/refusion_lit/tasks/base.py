"""The interface of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Literal

from refusion_lit.types import Example
from refusion_lit.utils.require import is_number, require

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Task(ABC):
    """Examples to train and test on, and a scoring function for responses.

    A task is one module. Its examples are generated (then they are deterministic functions of a seed) or read from
    files; its splits are disjoint.
    """

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split in a fixed order, with ids that are unique within the task.

        Args:
            split: The split.

        Raises:
            ValueError: If the examples cannot be read; the message names file and line.
        """

    @abstractmethod
    def score(self, example: Example, response: str) -> float | None:
        """Return the score of a response in [0, 1]; ``None`` if it is scored later.

        Args:
            example: The example that the response answers.
            response: The decoded response, without end-of-sequence token.
        """

    def characters(self) -> str | None:
        """Return all characters of queries and responses, for a character tokenizer; ``None`` if unknown."""
        return None


def examples_of(task: Task, split: Split) -> Sequence[Example]:
    """Return the examples of a split.

    Raises:
        ValueError: If the task returns something else than a sequence of examples.
    """
    examples = task.examples(split)
    name = f"{type(task).__name__}.examples"
    fix = "return a list of Example"
    is_sequence = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    require(is_sequence, name, "a sequence of examples", type(examples).__name__, fix)
    first = examples[0] if len(examples) else None
    holds = first is None or isinstance(first, Example)
    require(holds, name, "a sequence of refusion_lit.types.Example", f"one of {type(first).__name__}", fix)
    return examples


def score_of(task: Task, example: Example, response: str) -> float | None:
    """Return a task's score of a response.

    Raises:
        ValueError: If it is neither a number from 0 to 1 nor ``None``.
    """
    try:
        score = task.score(example, response)
    except Exception as error:
        error.add_note(f"{type(task).__name__}.score failed on example {example.id!r}, response {response[:200]!r}")
        raise
    holds = score is None or isinstance(score, bool) or (is_number(score, Real) and 0 <= score <= 1)
    name = f"{type(task).__name__}.score"
    expected = "a number from 0 to 1, or None"
    require(holds, name, expected, score, f"see what it returns for example {example.id!r}")
    return score
