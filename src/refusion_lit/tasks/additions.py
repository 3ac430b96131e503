"""Additions: a list of sums, one after the other. ``12+34,56+78>`` asks for ``12+34=46;56+78=134;``."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, check_range, digits
from refusion_lit.types import Example

_NUM_OPERANDS = 90  # 10 to 99
_NUM_SUMS = _NUM_OPERANDS**2


@dataclass(frozen=True, kw_only=True)
class Additions(GeneratedTask):
    """Two to five sums of two two-digit numbers; the first ``min_terms`` of them are the key.

    Attributes:
        min_terms: Fewest sums in a query, 1 to 64.
        max_terms: Most sums in a query, ``min_terms`` to 64; every number between is equally frequent.
    """

    grows_with: ClassVar[str] = "min_terms"

    min_terms: int = 2
    max_terms: int = 5

    def __post_init__(self) -> None:
        """Check the options."""
        check_range("min_terms", self.min_terms, 1, 64)
        check_range("max_terms", self.max_terms, self.min_terms, 64)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """8100 possible sums in each of ``min_terms`` places."""
        return _NUM_SUMS**self.min_terms

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return sums, and the same sums with their results."""
        num_terms = rng.randint(self.min_terms, self.max_terms)
        number = key + self.num_keys * rng.randrange(_NUM_SUMS ** (num_terms - self.min_terms))
        operands = [10 + digit for digit in digits(number, _NUM_OPERANDS, 2 * num_terms)]
        pairs = list(zip(operands[::2], operands[1::2], strict=True))
        query = ",".join([f"{a}+{b}" for a, b in pairs]) + ">"
        response = "".join([f"{a}+{b}={a + b};" for a, b in pairs])
        return query, response

    def score(self, example: Example, response: str) -> float:
        """Return 1 for exactly the reference, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, signs and separators."""
        return "0123456789+=,;>"
