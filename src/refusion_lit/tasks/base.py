"""The interface of tasks, and the base class of generated ones.

Each example of a generated task has a unique *key* in ``range(num_keys)``, and different keys always give different
queries. A seeded permutation assigns the keys to train, validation and test in turn. Examples are therefore distinct
and splits disjoint, example ``i`` of a split does not depend on the split sizes, and none of this needs stored examples
or comparisons.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from random import Random
from typing import Any, Literal, overload

from refusion_lit.types import Example
from refusion_lit.utils.keys import permute, stable_key
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


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """A task whose examples are functions of seed, split and index only.

    A subclass defines the number of keys (``num_keys``) and the example of a key (``draw``). It validates its own
    options before it calls this class's ``__post_init__``.

    Attributes:
        num_train: Number of training examples, all distinct.
        num_validation: Number of validation examples, distinct and disjoint from the training examples.
        num_test: Number of test examples, distinct and disjoint from the other splits.
        seed: Random seed of the examples.
    """

    num_train: int = 200_000
    num_validation: int = 500
    num_test: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that each split fits into its third of the keys.

        Raises:
            ValueError: If a split size is negative or greater than a third of the keys.
        """
        capacity = self.num_keys // len(SPLITS)
        for split in SPLITS:
            size = self.size(split)
            queries = f"{self.num_keys} distinct queries of {type(self).__name__} with these options"
            expected = f"0 to {capacity} (a third of the {queries})"
            fix = "change it, or the options that make queries longer"
            require(0 <= size <= capacity, f"num_{split}", expected, size, fix)

    @property
    @abstractmethod
    def num_keys(self) -> int:
        """Number of keys; at most 2**1024."""

    @abstractmethod
    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return query and response of an example.

        Args:
            key: Key in ``range(num_keys)``. Different keys give different queries for any draws of ``rng``.
            rng: Draws what the key does not determine; seeded with the task's seed and the key.
        """

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference, else 0."""
        return float(response == example.response)

    def size(self, split: Split) -> int:
        """Return the number of examples of a split."""
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}[split]

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split as a lazy sequence, which generates each example on access.

        Args:
            split: The split.
        """
        return LazyExamples(size=self.size(split), make=partial(self.example, split))

    def example(self, split: Split, index: int) -> Example:
        """Generate one example.

        Args:
            split: The split.
            index: Index in ``range(size(split))``.
        """
        name = type(self).__name__
        key = permute(len(SPLITS) * index + SPLITS.index(split), self.num_keys, f"{name}:{self.seed}")
        query, response = self.draw(key, Random(stable_key("task", name, self.seed, str(key))))
        return Example(id=f"{split}-{index}", query=query, response=response)


@dataclass(frozen=True, kw_only=True)
class LazyExamples(Sequence[Example]):
    """A sequence whose examples are made on access; it pickles to a few bytes for any length.

    Attributes:
        size: Number of examples.
        make: Returns the example with an index in ``range(size)``.
    """

    size: int
    make: Callable[[int], Example]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        chosen = range(self.size)[index]
        return [self.make(i) for i in chosen] if isinstance(chosen, range) else self.make(chosen)


def digits(number: int, base: int, count: int) -> list[int]:
    """Return the ``count`` lowest digits of a number in a base, lowest first."""
    result: list[int] = []
    for _ in range(count):
        number, digit = divmod(number, base)
        result.append(digit)
    return result
