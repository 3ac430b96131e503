"""Square grids of digits as text, shared by the grid tasks.

A grid is a string of cells, row after row. It is written with a ``/`` after each row; ``.`` is a
blank cell. Several grids are written one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import permutations

Square = tuple[str, ...]


def written(cells: str, size: int) -> str:
    """Return a grid as text, each row of ``size`` cells ended by a slash."""
    return "".join([cells[start : start + size] + "/" for start in range(0, size * size, size)])


def blanked(cells: str, shown: Collection[int]) -> str:
    """Return a grid's cells with blanks everywhere but in the cells ``shown``."""
    return "".join([cell if place in shown else "." for place, cell in enumerate(cells)])


def all_squares(size: int, fits: Callable[[Square, str], bool]) -> list[Square]:
    """Return every square, as a tuple of rows, that can be built up row by row.

    Args:
        size: Rows and columns; each row is a permutation of the digits from 1 to ``size``.
        fits: Whether a row may follow the rows above it.
    """
    rows = ["".join(row) for row in permutations("123456789"[:size])]
    squares: list[Square] = [()]
    for _ in range(size):
        squares = [(*above, row) for above in squares for row in rows if fits(above, row)]
    return squares


def columns_differ(above: Square, row: str) -> bool:
    """Say whether a row repeats no digit of the same column above it."""
    return all(cell != other for earlier in above for cell, other in zip(row, earlier, strict=True))
