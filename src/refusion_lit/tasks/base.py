"""The interface of tasks, and their examples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One query with its reference response.

    Attributes:
        id: Unique within the task; names the example in results and keys its noise.
        query: The question, before any template; ignored if ``messages`` is given.
        response: The reference response, without end-of-sequence token.
        messages: Chat turns before the response (``{"role": ..., "content": ...}``), for chat data.
        meta: Additional values for the task's scoring.
        spans: Character ranges ``(start, stop)`` of the response that are to be filled in, in text order; the rest of
            the response is then given. Empty: nothing of it is given.
    """

    id: str
    query: str
    response: str
    messages: tuple[Mapping[str, str], ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[tuple[int, int], ...] = ()


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
        found = self.score(example, response)
        score = found["score"] if isinstance(found, Mapping) else found
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
