"""Small sudokus: 4x4 grids with exactly one solution, written like Latin squares: ``.13./.3../14../3..4/``.

Each row, column and 2x2 box contains each digit once. Unlike a Latin square with few clues, a puzzle has one correct
answer; the difficulty is the order in which its cells can be determined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, digits
from refusion_lit.tasks.grids import Square, all_squares, columns_differ, keep_cells, to_text
from refusion_lit.types import Example
from refusion_lit.utils.require import require_between

_SIZE = 4
_NUM_CELLS = _SIZE**2
_NUM_GRIDS = 288


@dataclass(frozen=True, kw_only=True)
class Sudoku(GeneratedTask):
    """Four 4x4 sudokus with nine holes and one solution each.

    The key determines the solutions. A puzzle has only one solution, so different solutions give different queries.

    Attributes:
        num_grids: Number of puzzles in a query, 1 to 64.
        num_holes: Number of blank cells in each puzzle, 1 to 11.
    """

    capacity_option: ClassVar[str] = "num_grids"

    num_grids: int = 4
    num_holes: int = 9

    def __post_init__(self) -> None:
        require_between("num_grids", self.num_grids, 1, 64)
        require_between("num_holes", self.num_holes, 1, 11)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """All sequences of solutions."""
        return _NUM_GRIDS**self.num_grids

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return puzzles, and their solutions."""
        query = response = ""
        for number in digits(key, _NUM_GRIDS, self.num_grids):
            cells = _grids()[number]
            shown = rng.sample(range(_NUM_CELLS), _NUM_CELLS - self.num_holes)
            while _solutions(cells, shown) != 1 << number:
                shown = rng.sample(range(_NUM_CELLS), _NUM_CELLS - self.num_holes)
            query += to_text(keep_cells(cells, shown), _SIZE)
            response += to_text(cells, _SIZE)
        return query, response

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference, which is the only solution, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, blank and row end."""
        return "1234./"


@cache
def _grids() -> list[str]:
    """Return the 288 complete grids."""

    def fits(above: Square, row: str) -> bool:
        box_rows = above[-1:] if len(above) % 2 else ()
        boxes_differ = all(not set(row[:2]) & set(earlier[:2]) for earlier in box_rows)
        return boxes_differ and columns_differ(above, row)

    return ["".join(square) for square in all_squares(_SIZE, fits)]


@cache
def _grids_with() -> list[dict[str, int]]:
    """Return for each cell and digit the set of grids with that digit in the cell, as a bit mask over the grids."""
    return [
        {digit: sum(1 << number for number, cells in enumerate(_grids()) if cells[cell] == digit) for digit in "1234"}
        for cell in range(_NUM_CELLS)
    ]


def _solutions(cells: str, shown: list[int]) -> int:
    """Return the set of grids that agree with ``cells`` in the shown cells, as a bit mask over the grids."""
    grids_with = _grids_with()
    solutions = (1 << _NUM_GRIDS) - 1
    for cell in shown:
        solutions &= grids_with[cell][cells[cell]]
    return solutions
