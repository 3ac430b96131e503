"""Latin squares with few clues, such as ``..3../..2../...../.3.4./...../``; most queries have many solutions.

In a Latin square each row and each column contains each digit once. Cells that are decoded in parallel can each be
plausible and still conflict, so parallel decoding costs accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, digits
from refusion_lit.tasks.grids import Square, all_squares, columns_differ, keep_cells, to_text
from refusion_lit.types import Example
from refusion_lit.utils.require import require_between

_SIZE = 5
_NUM_CELLS = _SIZE**2
_DIGITS = "12345"


@dataclass(frozen=True, kw_only=True)
class Latin(GeneratedTask):
    """Two 5x5 Latin squares to complete from four clues each; every valid completion is correct.

    The key determines the cells of the clues; their digits come from a uniformly drawn square.

    Attributes:
        num_grids: Number of squares in a query, 1 to 32.
        num_clues: Number of given cells in each square, 1 to 24.
    """

    capacity_option: ClassVar[str] = "num_grids"

    num_grids: int = 2
    num_clues: int = 4

    def __post_init__(self) -> None:
        require_between("num_grids", self.num_grids, 1, 32)
        require_between("num_clues", self.num_clues, 1, _NUM_CELLS - 1)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """All choices of clue cells in each square."""
        return comb(_NUM_CELLS, self.num_clues) ** self.num_grids

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return squares with a few clues, and the complete squares."""
        query = response = ""
        for rank in digits(key, comb(_NUM_CELLS, self.num_clues), self.num_grids):
            cells = _random_square(rng)
            query += to_text(keep_cells(cells, _combination(rank, self.num_clues)), _SIZE)
            response += to_text(cells, _SIZE)
        return query, response

    def score(self, example: Example, response: str) -> float:
        """Return 1 for Latin squares that agree with all clues, else 0."""
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
    """Return the 56 reduced Latin squares: first row and first column are sorted."""

    def fits(above: Square, row: str) -> bool:
        is_sorted = row == _DIGITS if not above else row[0] == _DIGITS[len(above)]
        return is_sorted and columns_differ(above, row)

    return all_squares(_SIZE, fits)


def _random_square(rng: Random) -> str:
    """Draw one of the 161280 squares uniformly.

    Each square results from exactly one reduced square by one permutation of its columns and its lower rows.
    """
    first, *lower = rng.choice(_reduced_squares())
    columns = rng.sample(range(_SIZE), _SIZE)
    rows = [first, *rng.sample(lower, len(lower))]
    return "".join([row[column] for row in rows for column in columns])


def _combination(rank: int, count: int) -> set[int]:
    """Return the combination of ``count`` of the 25 cells with a rank in ``range(comb(25, count))``."""
    chosen: set[int] = set()
    for cell in range(_NUM_CELLS):
        num_with_cell = comb(_NUM_CELLS - cell - 1, count - len(chosen) - 1) if len(chosen) < count else 0
        if rank < num_with_cell:
            chosen.add(cell)
        else:
            rank -= num_with_cell
    return chosen
