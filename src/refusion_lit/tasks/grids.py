"""Square grids of digits as text, shared by the grid tasks.

A grid is a string of its cells, row after row, where ``.`` is a blank cell. As text, each row ends with ``/``; several
grids are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import permutations

Square = tuple[str, ...]


def to_text(cells: str, size: int) -> str:
    """Return a grid as text: each row of ``size`` cells ends with a slash."""
    return "".join([cells[start : start + size] + "/" for start in range(0, size * size, size)])


def keep_cells(cells: str, kept: Collection[int]) -> str:
    """Blank all cells except those with an index in ``kept``."""
    return "".join([cell if index in kept else "." for index, cell in enumerate(cells)])


def all_squares(size: int, fits: Callable[[Square, str], bool]) -> list[Square]:
    """Return all squares whose rows fit, each as a tuple of rows.

    Args:
        size: Number of rows and columns; each row is a permutation of the digits from 1 to ``size``.
        fits: Whether a row may follow the rows above it.
    """
    rows = ["".join(row) for row in permutations("123456789"[:size])]
    squares: list[Square] = [()]
    for _ in range(size):
        squares = [(*above, row) for above in squares for row in rows if fits(above, row)]
    return squares


def columns_differ(above: Square, row: str) -> bool:
    """Return whether a row repeats no digit of the same column in the rows above."""
    return all(cell != other for earlier in above for cell, other in zip(row, earlier, strict=True))
