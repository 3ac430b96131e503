"""Latin squares with few clues. ``..3../..2../...../.3.4./...../`` may be answered by many squares.

In a Latin square each row and each column holds each digit once. Cells chosen at the same time may
each be fine and yet clash, so filling in many at once costs accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, check_range, digits
from refusion_lit.tasks.grids import Square, all_squares, blanked, columns_differ, written
from refusion_lit.types import Example

_SIZE = 5
_NUM_CELLS = _SIZE**2
_DIGITS = "12345"


@dataclass(frozen=True, kw_only=True)
class Latin(GeneratedTask):
    """Two 5x5 Latin squares to complete from four clues each; any right completion counts.

    The key is which cells the clues stand in; their digits come from a square drawn uniformly.

    Attributes:
        num_grids: Squares in a query, 1 to 32.
        num_clues: Cells given in each square, 1 to 24.
    """

    grows_with: ClassVar[str] = "num_grids"

    num_grids: int = 2
    num_clues: int = 4

    def __post_init__(self) -> None:
        """Check the options."""
        check_range("num_grids", self.num_grids, 1, 32)
        check_range("num_clues", self.num_clues, 1, _NUM_CELLS - 1)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """Every choice of clue cells in each of the squares."""
        return comb(_NUM_CELLS, self.num_clues) ** self.num_grids

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return squares with a few clues, and the squares that the clues were taken from."""
        query = response = ""
        for rank in digits(key, comb(_NUM_CELLS, self.num_clues), self.num_grids):
            cells = _random_square(rng)
            query += written(blanked(cells, _combination(rank, self.num_clues)), _SIZE)
            response += written(cells, _SIZE)
        return query, response

    def score(self, example: Example, response: str) -> float:
        """Return 1 for Latin squares that keep every clue, whichever they are, else 0."""
        if len(response) != len(example.query):
            return 0.0
        if not all(
            given == cell or (given == "." and cell in _DIGITS)
            for given, cell in zip(example.query, response, strict=True)
        ):
            return 0.0
        rows = response.split("/")[:-1]
        grids = [rows[start : start + _SIZE] for start in range(0, len(rows), _SIZE)]
        lines = rows + ["".join(column) for grid in grids for column in zip(*grid, strict=True)]
        return float(all(set(line) == set(_DIGITS) for line in lines))

    def characters(self) -> str:
        """Return digits, blank and row end."""
        return _DIGITS + "./"


@cache
def _reduced_squares() -> list[Square]:
    """Return the 56 Latin squares whose first row and first column are in order."""

    def fits(above: Square, row: str) -> bool:
        in_order = row == _DIGITS if not above else row[0] == _DIGITS[len(above)]
        return in_order and columns_differ(above, row)

    return all_squares(_SIZE, fits)


def _random_square(rng: Random) -> str:
    """Return one of the 161280 squares: each comes from one reduced square by one shuffle of columns and lower rows."""
    first, *lower = rng.choice(_reduced_squares())
    columns = rng.sample(range(_SIZE), _SIZE)
    rows = [first, *rng.sample(lower, len(lower))]
    return "".join([row[column] for row in rows for column in columns])


def _combination(rank: int, count: int) -> set[int]:
    """Return the choice of ``count`` cells that has a rank below ``comb(25, count)``, each choice once."""
    chosen: set[int] = set()
    for cell in range(_NUM_CELLS):
        num_with_cell = comb(_NUM_CELLS - cell - 1, count - len(chosen) - 1) if len(chosen) < count else 0
        if rank < num_with_cell:
            chosen.add(cell)
        else:
            rank -= num_with_cell
    return chosen
