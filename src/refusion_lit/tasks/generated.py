"""What generated tasks share: sizes, splits that cannot overlap, and examples made when they are read.

Every example of a task has a *key* of its own below ``num_keys``, and two keys never give the same
query. A seeded permutation of the keys deals them out in turn to train, validation and test. So
examples are distinct, splits are disjoint, example ``i`` of a split depends on no size, and nothing
is stored or compared to make it so.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, overload

from refusion_lit.noise import stable_key
from refusion_lit.tasks.base import SPLITS, Split, Task
from refusion_lit.types import Example

_NUM_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """A task whose examples are functions of seed, split and index alone.

    A subclass says how many keys there are (``num_keys``) and what a key looks like (``draw``).
    It checks its own options before calling this class's ``__post_init__``.

    Attributes:
        num_train: Training examples, all distinct.
        num_validation: Validation examples, distinct and not among the training examples.
        num_test: Test examples, distinct and in neither of the other splits.
        seed: Another seed gives other examples.
    """

    grows_with: ClassVar[str]
    """The option to raise when there are too few keys."""

    num_train: int = 200_000
    num_validation: int = 500
    num_test: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that each split fits into its share of the keys.

        Raises:
            ValueError: If a size is negative or larger than a third of the keys.
        """
        capacity = self.num_keys // len(SPLITS)
        for split in SPLITS:
            size = self.size(split)
            if not 0 <= size <= capacity:
                raise ValueError(
                    f"num_{split}: expected 0 to {capacity} (a third of the {self.num_keys} distinct queries that "
                    f"{type(self).__name__} tells apart with these options), got {size}. "
                    f"Change num_{split}, or raise {self.grows_with}."
                )

    @property
    @abstractmethod
    def num_keys(self) -> int:
        """How many keys there are; at most 2**1024."""

    @abstractmethod
    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return query and response of one example.

        Args:
            key: From 0 to ``num_keys - 1``; whatever ``rng`` yields, two keys give different queries.
            rng: Chooses what the key leaves open; seeded by the task's seed and the key.
        """

    def size(self, split: Split) -> int:
        """Return how many examples a split has."""
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}[split]

    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples; each is made when it is read, and none is kept.

        Args:
            split: Which of the non-overlapping splits.
        """
        return GeneratedExamples(task=self, split=split)

    def example(self, split: Split, index: int) -> Example:
        """Make one example.

        Args:
            split: Which of the non-overlapping splits.
            index: From 0 to ``size(split) - 1``.
        """
        name = type(self).__name__
        key = permuted(len(SPLITS) * index + SPLITS.index(split), self.num_keys, f"{name}:{self.seed}")
        query, response = self.draw(key, Random(stable_key("task", name, self.seed, str(key))))
        return Example(id=f"{split}-{index}", query=query, response=response)


@dataclass(frozen=True, kw_only=True)
class GeneratedExamples(Sequence[Example]):
    """A split of a generated task, a few bytes whatever its length.

    Attributes:
        task: Makes the examples.
        split: Which of its splits.
    """

    task: GeneratedTask
    split: Split

    def __len__(self) -> int:
        """Return the split's size."""
        return self.task.size(self.split)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        """Make the example at an index, or the list of those in a slice."""
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return [self.task.example(self.split, i) for i in chosen]
        return self.task.example(self.split, chosen)


def permuted(index: int, size: int, seed: str) -> int:
    """Return where a seeded permutation of ``range(size)`` sends an index.

    A Feistel network (Luby and Rackoff, SIAM J. Comput. 1988) permutes the numbers of an even number
    of bits; results outside of the range are sent on until one falls inside ("cycle walking", Black
    and Rogaway, CT-RSA 2002). Neither time nor memory grows with ``size``.

    Args:
        index: From 0 to ``size - 1``.
        size: From 1 to 2**1024.
        seed: Another seed gives another permutation.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for number in range(_NUM_ROUNDS):
            digest = hashlib.blake2b(f"{seed}:{number}:{right:x}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        value = left << half | right
        if value < size:
            return value


def digits(number: int, base: int, count: int) -> list[int]:
    """Return the ``count`` lowest digits of a number, lowest first."""
    result: list[int] = []
    for _ in range(count):
        number, digit = divmod(number, base)
        result.append(digit)
    return result


def check_range(option: str, value: int, low: int, high: int) -> None:
    """Refuse an option outside of its range.

    Args:
        option: The option's name.
        value: What was given.
        low: The smallest value allowed.
        high: The largest value allowed.

    Raises:
        ValueError: If ``value`` is not between ``low`` and ``high``.
    """
    if not low <= value <= high:
        raise ValueError(
            f"{option}: expected an integer from {low} to {high}, got {value!r}. "
            f"Change {option} in the config or on the command line."
        )
