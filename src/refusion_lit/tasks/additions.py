"""Additions: a list of sums to compute in order. The response to ``12+34,56+78>`` is ``12+34=46;56+78=134;``."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, digits
from refusion_lit.types import Example
from refusion_lit.utils.require import require_between

_NUM_OPERANDS = 90  # 10 to 99
_NUM_SUMS = _NUM_OPERANDS**2
_MAX_TERMS = 64


@dataclass(frozen=True, kw_only=True)
class Additions(GeneratedTask):
    """Two to five sums of two two-digit numbers. The key determines the first ``min_terms`` sums.

    Attributes:
        min_terms: Minimum number of sums in a query, 1 to 64.
        max_terms: Maximum number of sums in a query, ``min_terms`` to 64. The number is uniformly distributed.
    """

    capacity_option: ClassVar[str] = "min_terms"

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

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, operators and separators."""
        return "0123456789+=,;>"
