"""Sheet: independent sums and differences. The response to ``30+75=...;77-47=...;`` is ``30+75=105;77-47=030;``.

The query has the same length as the response, and no cell depends on another. Decoding all cells in parallel therefore
loses no accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, digits
from refusion_lit.types import Example
from refusion_lit.utils.require import require_between

_PAIRS = tuple(combinations_with_replacement(range(10, 100), 2))  # the smaller number first


@dataclass(frozen=True, kw_only=True)
class Sheet(GeneratedTask):
    """Eight cells, each the sum or the non-negative difference of two two-digit numbers.

    The key determines the unordered pair of numbers in each cell. A cell is a sum with probability 0.5.

    Attributes:
        num_terms: Number of cells in a query, 1 to 64.
    """

    capacity_option: ClassVar[str] = "num_terms"

    num_terms: int = 8

    def __post_init__(self) -> None:
        require_between("num_terms", self.num_terms, 1, 64)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """4095 unordered pairs for each cell."""
        return len(_PAIRS) ** self.num_terms

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return a sheet with blank results, and the sheet with results."""
        questions: list[str] = []
        answers: list[str] = []
        for digit in digits(key, len(_PAIRS), self.num_terms):
            small, large = _PAIRS[digit]
            if rng.random() < 0.5:
                question, result = f"{large}-{small}=", large - small
            else:
                first, second = (small, large) if rng.random() < 0.5 else (large, small)
                question, result = f"{first}+{second}=", first + second
            questions.append(f"{question}...;")
            answers.append(f"{question}{result:03d};")
        return "".join(questions), "".join(answers)

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, operators, blank and separator."""
        return "0123456789+-=.;"
