"""What a task is: examples by split, and a checker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from refusion_lit.types import Example

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Task(ABC):
    """Examples to learn from and to be measured on.

    A task is one file: where its examples come from (generated or read), and how a response is scored.
    Generated tasks are deterministic functions of their seed, with splits that never overlap.
    """

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples, in a fixed order, with ids unique over the whole task.

        Args:
            split: Which of the non-overlapping splits.

        Raises:
            ValueError: If the examples cannot be read, naming file and line.
        """

    @abstractmethod
    def score(self, example: Example, response: str) -> float | None:
        """Return how right a response is, from 0 to 1; ``None`` if it is not to be scored here.

        Args:
            example: The example that was asked.
            response: The decoded response, without end-of-sequence token.
        """

    def characters(self) -> str | None:
        """Return every character that queries and responses use, for a character tokenizer; ``None`` if open."""
        return None
