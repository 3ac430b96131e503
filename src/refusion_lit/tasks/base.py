"""The interface of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from refusion_lit.types import Example

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
