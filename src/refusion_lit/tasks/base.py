"""The interface for tasks and examples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from refusion_lit.utils.require import is_number, require

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MORE_THAN_TEXT = ("reasoning_content", "reasoning", "thinking", "function_call", "tool_calls")
"""Parts of an assistant's turn besides its text; the chat template renders the turn whole."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A query with its reference response.

    Attributes:
        id: Unique within the task; names the example in results and keys its noise.
        query: The question, before any template; ignored if ``messages`` is given.
        response: The reference response, without EOS token.
        messages: Chat turns before the response (``{"role": ..., "content": ...}``), for chat data; the chat template
            gets them as they are.
        meta: Additional values for the task's scoring, and ``tools`` for the chat template.
        spans: Character ranges ``(start, stop)`` of the response to fill in, in text order; the rest of the response is
            given. Without spans, nothing is given.
        answer: The assistant's turn as the chat template gets it, if the turn has more than text, such as tool calls.
            ``response`` is then the turn's text, which may be empty; a test's reference is the rendered turn.
    """

    id: str
    query: str
    response: str
    messages: tuple[Mapping[str, Any], ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[tuple[int, int], ...] = ()
    answer: Mapping[str, Any] | None = None


class Task(ABC):
    """Examples to train and test on, and a scoring function for responses.

    Examples are read from files or generated as deterministic functions of a seed. Splits are disjoint.

    Attributes:
        metrics: Names of the metrics that :meth:`score` returns in addition to the score.

    >>> class Reversal(Task):
    ...     def examples(self, split):
    ...         return [Example(id="0", query="abc", response="cba")]
    ...
    ...     def score(self, example, response):
    ...         return float(response == example.response)
    >>> task = Reversal()
    >>> task.score(task.examples("test")[0], "cba")
    1.0
    """

    metrics: tuple[str, ...] = ()

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples in a fixed order; ids are unique within the task.

        Args:
            split: The split.

        Raises:
            ValueError: If an example cannot be read; the message names file and line.
        """

    @abstractmethod
    def score(self, example: Example, response: str) -> float | Mapping[str, float] | None:
        """Return a response's score in [0, 1]; ``None`` if it is scored later.

        A task with ``metrics`` returns a mapping with ``score`` and a finite number for every name in ``metrics``.

        Args:
            example: The example that the response answers.
            response: The decoded response, without EOS token.
        """

    def reward(self, example: Example, response: str) -> float:
        """Return a response's reward in reinforcement learning: by default its score, NaN if it is scored later."""
        result = self.score(example, response)
        score = result["score"] if isinstance(result, Mapping) else result
        return math.nan if score is None else float(score)

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
        """Return the responses' rewards; see :meth:`reward`."""
        return [self.reward(example, response) for example, response in zip(examples, responses, strict=True)]

    def describe_test_split(self) -> str:
        """Describe the test examples in a few words, for tables, model cards and the hub."""
        return "test split"

    def characters(self) -> str | None:
        """Return the characters that queries and responses use, for a character tokenizer; ``None`` if unknown."""
        return None


def score_response(task: Task, example: Example, response: str) -> tuple[float | None, dict[str, float]]:
    """Score a response, and check what the task returns.

    Returns:
        The score, and the task's further metrics by name. The metrics are empty if the score is ``None``.

    Raises:
        ValueError: If the score is neither ``None`` nor a number from 0 to 1. If the metrics have other names than
            ``task.metrics``, or are not finite numbers.
    """
    name = f"{type(task).__name__}.score"
    try:
        returned = task.score(example, response)
    except Exception as error:
        error.add_note(f"{name} failed on example {example.id!r}, response {response[:200]!r}")
        raise
    fix = f"check what it returns for example {example.id!r}"
    figures: Mapping[str, Any] = returned if isinstance(returned, Mapping) else {"score": returned}
    score = figures.get("score")
    is_score = score is None or isinstance(score, bool) or (is_number(score, Real) and 0 <= score <= 1)
    require(is_score, name, "a number from 0 to 1, or None", score, fix)
    if returned is None or (score is None and "score" in figures):
        return None, {}
    are_finite = all(isinstance(value, Real) and math.isfinite(value) for value in figures.values())
    are_named = figures.keys() == {"score", *task.metrics}
    expected = f"finite numbers by name: {', '.join(('score', *task.metrics))}"
    require(are_finite and are_named, name, expected, returned, fix)
    return None if score is None else float(score), {key: float(figures[key]) for key in task.metrics}
