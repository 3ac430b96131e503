"""Exact calculations: ``Sheet``, whose cells are independent, and ``Additions``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from random import Random

from refusion_lit.tasks.base import GeneratedTask, digits
from refusion_lit.utils.require import require_between

_NUM_OPERANDS = 90  # 10 to 99
_NUM_SUMS = _NUM_OPERANDS**2
_MAX_TERMS = 64
_PAIRS = tuple(combinations_with_replacement(range(10, 100), 2))  # the smaller number first


@dataclass(frozen=True, kw_only=True)
class Additions(GeneratedTask):
    """Two to five sums of two two-digit numbers: the response to ``12+34,56+78>`` is ``12+34=46;56+78=134;``.

    The key determines the first ``min_terms`` sums.

    Attributes:
        min_terms: Minimum number of sums in a query, 1 to 64.
        max_terms: Maximum number of sums in a query, ``min_terms`` to 64. The number is uniformly distributed.
    """

    min_terms: int = 2
    max_terms: int = 5

    def __post_init__(self) -> None:
        require_between("min_terms", self.min_terms, 1, _MAX_TERMS)
        require_between("max_terms", self.max_terms, self.min_terms, _MAX_TERMS)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """8100 possible sums for each of the first ``min_terms``."""
        return _NUM_SUMS**self.min_terms

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return the sums, and the sums with their results."""
        num_terms = rng.randint(self.min_terms, self.max_terms)
        number = key + self.num_keys * rng.randrange(_NUM_SUMS ** (num_terms - self.min_terms))
        operands = [10 + digit for digit in digits(number, _NUM_OPERANDS, 2 * num_terms)]
        pairs = list(zip(operands[::2], operands[1::2], strict=True))
        query = ",".join([f"{a}+{b}" for a, b in pairs]) + ">"
        response = "".join([f"{a}+{b}={a + b};" for a, b in pairs])
        return query, response

    def characters(self) -> str:
        """Return digits, operators and separators."""
        return "0123456789+=,;>"


@dataclass(frozen=True, kw_only=True)
class Sheet(GeneratedTask):
    """Eight sums or non-negative differences: the response to ``30+75=...;77-47=...;`` is ``30+75=105;77-47=030;``.

    The query has the same length as the response, and no cell depends on another. Decoding all cells in parallel
    therefore loses no accuracy.

    The key determines the unordered pair of numbers in each cell. A cell is a sum with probability 0.5.

    Attributes:
        num_terms: Number of cells in a query, 1 to 64.
    """

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
                question = f"{large}-{small}="
                result = large - small
            else:
                first, second = (small, large) if rng.random() < 0.5 else (large, small)
                question = f"{first}+{second}="
                result = first + second
            questions.append(f"{question}...;")
            answers.append(f"{question}{result:03d};")
        return "".join(questions), "".join(answers)

    def characters(self) -> str:
        """Return digits, operators, blank and separator."""
        return "0123456789+-=.;"
