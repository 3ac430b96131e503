"""Sheet: independent sums and differences. ``30+75=...;77-47=...;`` asks for ``30+75=105;77-47=030;``.

The query is a blank of the answer's width and no cell depends on another, so nothing is lost by
filling in all cells at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, check_range, digits
from refusion_lit.types import Example

_PAIRS = tuple(combinations_with_replacement(range(10, 100), 2))  # the smaller number first


@dataclass(frozen=True, kw_only=True)
class Sheet(GeneratedTask):
    """Eight cells, each a sum or a difference of two two-digit numbers; never a negative difference.

    The key is which two numbers, in either order, stand in each cell. Half of the cells are sums.

    Attributes:
        num_terms: Cells in a query, 1 to 64.
    """

    grows_with: ClassVar[str] = "num_terms"

    num_terms: int = 8

    def __post_init__(self) -> None:
        """Check the options."""
        check_range("num_terms", self.num_terms, 1, 64)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """4095 unordered pairs in each cell."""
        return len(_PAIRS) ** self.num_terms

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return a sheet with blank results, and the same sheet filled in."""
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
        """Return 1 for exactly the reference, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, signs, blank and separator."""
        return "0123456789+-=.;"
