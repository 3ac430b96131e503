"""Small sudokus: 4x4 grids with exactly one solution, written like Latin squares, ``.13./.3../14../3..4/``.

Each row, column and 2x2 box holds each digit once. Unlike a Latin square with few clues, there is one
right answer; the open question is which cells can be known first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import ClassVar

from refusion_lit.tasks.generated import GeneratedTask, check_range, digits
from refusion_lit.tasks.grids import Square, all_squares, blanked, columns_differ, written
from refusion_lit.types import Example

_SIZE = 4
_NUM_CELLS = _SIZE**2
_NUM_GRIDS = 288


@dataclass(frozen=True, kw_only=True)
class Sudoku(GeneratedTask):
    """Four 4x4 sudokus with nine holes and one solution each.

    The key is the solutions; as each is the only one, other solutions mean another query.

    Attributes:
        num_grids: Puzzles in a query, 1 to 64.
        num_holes: Blank cells in each puzzle, 1 to 11.
    """

    grows_with: ClassVar[str] = "num_grids"

    num_grids: int = 4
    num_holes: int = 9

    def __post_init__(self) -> None:
        """Check the options."""
        check_range("num_grids", self.num_grids, 1, 64)
        check_range("num_holes", self.num_holes, 1, 11)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """Every sequence of solutions."""
        return _NUM_GRIDS**self.num_grids

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return puzzles, and their solutions."""
        query = response = ""
        for number in digits(key, _NUM_GRIDS, self.num_grids):
            cells = _grids()[number]
            shown = rng.sample(range(_NUM_CELLS), _NUM_CELLS - self.num_holes)
            while _solutions(cells, shown) != 1 << number:
                shown = rng.sample(range(_NUM_CELLS), _NUM_CELLS - self.num_holes)
            query += written(blanked(cells, shown), _SIZE)
            response += written(cells, _SIZE)
        return query, response

    def score(self, example: Example, response: str) -> float:
        """Return 1 for exactly the reference, which is the only solution, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return digits, blank and row end."""
        return "1234./"


@cache
def _grids() -> list[str]:
    """Return the 288 filled grids."""

    def fits(above: Square, row: str) -> bool:
        box_rows = above[-1:] if len(above) % 2 else ()
        boxes_differ = all(not set(row[:2]) & set(earlier[:2]) for earlier in box_rows)
        return boxes_differ and columns_differ(above, row)

    return ["".join(square) for square in all_squares(_SIZE, fits)]


@cache
def _grids_with() -> list[dict[str, int]]:
    """Return for each cell and digit the set of grids that have it there, as bits of one integer."""
    return [
        {digit: sum(1 << number for number, cells in enumerate(_grids()) if cells[place] == digit) for digit in "1234"}
        for place in range(_NUM_CELLS)
    ]


def _solutions(cells: str, shown: list[int]) -> int:
    """Return the set of grids that agree with ``cells`` in the places shown, as bits of one integer."""
    grids_with = _grids_with()
    solutions = (1 << _NUM_GRIDS) - 1
    for place in shown:
        solutions &= grids_with[place][cells[place]]
    return solutions
