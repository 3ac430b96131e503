"""The interface of tasks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from refusion_lit.types import Example
from refusion_lit.utils.require import is_number, require

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Task(ABC):
    """Examples to train and test on, and a scoring function for responses.

    A task is one module. Its examples are generated (then they are deterministic functions of a seed) or read from
    files; its splits are disjoint.

    Attributes:
        metrics: Names of further metrics that :meth:`score` returns beside the score.
    """

    metrics: tuple[str, ...] = ()

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split in a fixed order, with ids that are unique within the task.

        Args:
            split: The split.

        Raises:
            ValueError: If the examples cannot be read; the message names file and line.
        """

    @abstractmethod
    def score(self, example: Example, response: str) -> float | Mapping[str, float] | None:
        """Return the score of a response in [0, 1]; ``None`` if it is scored later.

        A task with ``metrics`` returns a mapping: ``score``, and a finite number for each name in ``metrics``.

        Args:
            example: The example that the response answers.
            response: The decoded response, without end-of-sequence token.
        """

    def reward(self, example: Example, response: str) -> float:
        """Return the reward of a response in training on rewards; by default its score, NaN if that comes later."""
        score, _ = score_of(self, example, response)
        return math.nan if score is None else float(score)

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
        """Return :meth:`reward` of each response to its example."""
        return [self.reward(example, response) for example, response in zip(examples, responses, strict=True)]

    def tested(self) -> str:
        """Return what the examples of the test split are, for tables, model cards and the hub."""
        return "test split"

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
    texts = () if first is None else (first.query, first.response)
    holds = all(isinstance(text, str) for text in texts)
    require(holds, name, "examples whose query and response are texts", texts, "convert them with str")
    return examples


def score_of(task: Task, example: Example, response: str) -> tuple[float | None, dict[str, float]]:
    """Return a task's score of a response, and its further metrics by name; none where the score is ``None``.

    Raises:
        ValueError: If the score is neither a number from 0 to 1 nor ``None``, or the metrics are not finite numbers
            under the names in ``task.metrics``.
    """
    name = f"{type(task).__name__}.score"
    try:
        found = task.score(example, response)
    except Exception as error:
        error.add_note(f"{name} failed on example {example.id!r}, response {response[:200]!r}")
        raise
    fix = f"see what it returns for example {example.id!r}"
    figures: Mapping[str, Any] = found if isinstance(found, Mapping) else {"score": found}
    score = figures.get("score")
    holds = score is None or isinstance(score, bool) or (is_number(score, Real) and 0 <= score <= 1)
    require(holds, name, "a number from 0 to 1, or None", score, fix)
    if found is None or (score is None and "score" in figures):
        return None, {}
    are_finite = all(isinstance(value, Real) and math.isfinite(value) for value in figures.values())
    fits = are_finite and figures.keys() == {"score", *task.metrics}
    expected = f"finite numbers by name: {', '.join(('score', *task.metrics))}"
    require(fits, name, expected, found, fix)
    return None if score is None else float(score), {key: float(figures[key]) for key in task.metrics}
