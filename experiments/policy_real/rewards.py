"""Rewards of GSM8K answers that a small model can earn without the right number: form, and right arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.real_conversion.annotations import count_annotations

from refusion_lit.policy import Reward
from refusion_lit.tasks.gsm8k import extract_answer
from refusion_lit.types import Example

_EQUATION = re.compile(r"([\d.,()+*/x×÷ $-]+)=\s*\$?(\d[\d,]*(?:\.\d+)?)")  # noqa: RUF001
_HAS_OPERATION = re.compile(r"[\d)][+*/-]")
_SIGNS = str.maketrans({"x": "*", "×": "*", "÷": "/", "$": None, ",": None, " ": None})  # noqa: RUF001


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
    sides = [(left.translate(_SIGNS), right.translate(_SIGNS)) for left, right in _EQUATION.findall(text)]
    equations = [f"<<{left}={right}>>" for left, right in sides if _HAS_OPERATION.search(left)]
    num_right, num = count_annotations("".join(equations))
    return num_right / num if num else 0.0
