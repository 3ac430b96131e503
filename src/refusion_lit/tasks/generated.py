"""Base class of generated tasks: split sizes, disjoint splits, and examples generated on access.

Each example has a unique *key* in ``range(num_keys)``, and different keys always give different queries. A seeded
permutation assigns the keys to train, validation and test in turn. Examples are therefore distinct and splits disjoint,
example ``i`` of a split does not depend on the split sizes, and none of this needs stored examples or comparisons.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, overload

from refusion_lit.tasks.base import SPLITS, Split, Task
from refusion_lit.types import Example
from refusion_lit.utils.keys import permute, stable_key


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

    capacity_option: ClassVar[str]
    """Name of the option that increases ``num_keys``."""

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
            if not 0 <= size <= capacity:
                raise ValueError(
                    f"num_{split}: expected 0 to {capacity} (a third of the {self.num_keys} distinct queries of "
                    f"{type(self).__name__} with these options), got {size}. "
                    f"Change num_{split}, or raise {self.capacity_option}."
                )

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
        return GeneratedExamples(task=self, split=split)

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
class GeneratedExamples(Sequence[Example]):
    """The lazy sequence of a split's examples; it pickles to a few bytes for any length.

    Attributes:
        task: The task that generates the examples.
        split: The split.
    """

    task: GeneratedTask
    split: Split

    def __len__(self) -> int:
        return self.task.size(self.split)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return [self.task.example(self.split, i) for i in chosen]
        return self.task.example(self.split, chosen)


def digits(number: int, base: int, count: int) -> list[int]:
    """Return the ``count`` lowest digits of a number in a base, lowest first."""
    result: list[int] = []
    for _ in range(count):
        number, digit = divmod(number, base)
        result.append(digit)
    return result
