"""GSM8K with short answers, and rewards that a small model can earn without the right number: form, arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.real_conversion.annotations import count_annotations

from refusion_lit.contrib.rl import Reward
from refusion_lit.tasks import Example, Gsm8k, Split
from refusion_lit.tasks.gsm8k import extract_answer
from refusion_lit.utils.rows import DataRow

_EQUATION = re.compile(r"([\d.,()+*/x×÷ $-]+)=\s*\$?(\d[\d,]*(?:\.\d+)?)")  # noqa: RUF001
_HAS_OPERATION = re.compile(r"[\d)][+*/-]")
_SIGNS = str.maketrans({"x": "*", "×": "*", "÷": "/", "$": None, ",": None, " ": None})  # noqa: RUF001


@dataclass(frozen=True, kw_only=True)
class ShortGsm8k(Gsm8k):
    """GSM8K's questions with a request for a short answer, which a limit of a few dozen tokens can hold."""

    def _examples(self, row: DataRow, identity: str, split: Split) -> list[Example]:
        request = "Give only the final number, in the form '#### number'."
        examples = super()._examples(row, identity, split)
        return [replace(example, query=f"{example.query}\n{request}") for example in examples]


@dataclass(frozen=True, kw_only=True)
class Ended(Reward):
    """1 for every answer that ends within the limit: all others have reward 0 anyway."""

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:  # noqa: ARG002
        """Return the rewards; see :meth:`Reward.rewards`."""
        return [1.0] * len(responses)


@dataclass(frozen=True, kw_only=True)
class Format(Reward):
    """1 for an answer with a final number after ``####`` or in a box, as GSM8K asks for, else 0."""

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:  # noqa: ARG002
        """Return the rewards; see :meth:`Reward.rewards`."""
        return [float(extract_answer(text) is not None) for text in responses]


@dataclass(frozen=True, kw_only=True)
class RightArithmetic(Reward):
    """The share of an answer's equations, such as ``48 / 2 = 24`` or ``<<48/2=24>>``, that hold; 0 if it has none."""

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:  # noqa: ARG002
        """Return the rewards; see :meth:`Reward.rewards`."""
        return [right_share(text) for text in responses]


def right_share(text: str) -> float:
    """Return the share of a text's equations that hold, 0 if it has none."""
    num_right, num = count_equations(text)
    return num_right / num if num else 0.0


def count_equations(text: str) -> tuple[int, int]:
    """Return how many of a text's equations hold, and how many it has."""
    sides = [(left.translate(_SIGNS), right.translate(_SIGNS)) for left, right in _EQUATION.findall(text)]
    equations = [f"<<{left}={right}>>" for left, right in sides if _HAS_OPERATION.search(left)]
    return count_annotations("".join(equations))
