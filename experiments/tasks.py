"""Tasks of the experiments: walks, Latin squares with few clues, small sudokus, and text with spans left out.

Configs name them by class_path, as ``experiments.tasks.Walk``; run in the repository's root, with ``PYTHONPATH=.``. A
grid is a string of its cells, row after row, where ``.`` is a blank cell. As text, each row ends with ``/``; several
grids are concatenated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import permutations
from math import comb
from random import Random

from refusion_lit.noise import stable_key
from refusion_lit.tasks import Additions, Example, Records, Split, Task
from refusion_lit.tasks.generated import GeneratedTask, LazyExamples, digits, require_between
from refusion_lit.utils.require import require

_STEPS = "+-~"
_NEXT = {"+": "1234567890", "-": "9012345678", "~": "9876543210"}
_LATIN_SIZE = 5
_NUM_LATIN_CELLS = _LATIN_SIZE**2
_DIGITS = "12345"
_SUDOKU_SIZE = 4
_NUM_SUDOKU_CELLS = _SUDOKU_SIZE**2
_NUM_SUDOKUS = 288
_Square = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Walk(GeneratedTask):
    """A chain of sixteen steps in Z10: the response to ``>7|.~.;.+.;`` is ``7~2;2+3;``.

    The step ``+`` maps s to s + 1, ``-`` to s - 1 and ``~`` to 9 - s. A cell of the response is a state, the step and
    the next state. The query gives the first state after ``>`` or, with probability 0.5, the last after ``<``. All
    steps are invertible, so the cells are determined one by one from the known end.

    The key determines the steps. Walks with the same steps are therefore in the same split, even if one gives the first
    state and the other the last one.

    Attributes:
        num_steps: Number of steps, 1 to 256.
    """

    num_steps: int = 16

    def __post_init__(self) -> None:
        require_between("num_steps", self.num_steps, 1, 256)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """Three choices for each step."""
        return len(_STEPS) ** self.num_steps

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return the known state with blank cells, and the complete cells."""
        steps = [_STEPS[digit] for digit in digits(key, len(_STEPS), self.num_steps)]
        start = state = str(rng.randrange(10))
        cells: list[str] = []
        for step in steps:
            following = _NEXT[step][int(state)]
            cells.append(f"{state}{step}{following};")
            state = following
        known = f">{start}" if rng.random() < 0.5 else f"<{state}"
        return f"{known}|" + "".join([f".{step}.;" for step in steps]), "".join(cells)

    def characters(self) -> str:
        """Return digits, steps, directions, blank and separators."""
        return "0123456789+-~<>|.;"


@dataclass(frozen=True, kw_only=True)
class Latin(GeneratedTask):
    """Two 5x5 Latin squares to complete from four clues each, such as ``..3../..2../...../.3.4./...../``.

    Each row and each column contains each digit once; most queries have many solutions, and every valid completion is
    correct. Cells that are decoded in parallel can each be plausible and still conflict, so parallel decoding costs
    accuracy.

    The key determines the cells of the clues; their digits come from a uniformly drawn square.

    Attributes:
        num_grids: Number of squares in a query, 1 to 32.
        num_clues: Number of given cells in each square, 1 to 24.
    """

    num_grids: int = 2
    num_clues: int = 4

    def __post_init__(self) -> None:
        require_between("num_grids", self.num_grids, 1, 32)
        require_between("num_clues", self.num_clues, 1, _NUM_LATIN_CELLS - 1)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """All choices of clue cells in each square."""
        return comb(_NUM_LATIN_CELLS, self.num_clues) ** self.num_grids

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return squares with a few clues, and the complete squares."""
        query = response = ""
        for rank in digits(key, comb(_NUM_LATIN_CELLS, self.num_clues), self.num_grids):
            cells = _random_square(rng)
            query += _to_text(_keep_cells(cells, _combination(rank, self.num_clues)), _LATIN_SIZE)
            response += _to_text(cells, _LATIN_SIZE)
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
        grids = [rows[start : start + _LATIN_SIZE] for start in range(0, len(rows), _LATIN_SIZE)]
        lines = rows + ["".join(column) for grid in grids for column in zip(*grid, strict=True)]
        return float(all(set(line) == set(_DIGITS) for line in lines))

    def characters(self) -> str:
        """Return digits, blank and row end."""
        return _DIGITS + "./"


@cache
def _reduced_squares() -> list[_Square]:
    """Return the 56 reduced Latin squares: first row and first column are sorted."""

    def fits(above: _Square, row: str) -> bool:
        is_sorted = row == _DIGITS if not above else row[0] == _DIGITS[len(above)]
        return is_sorted and _columns_differ(above, row)

    return _all_squares(_LATIN_SIZE, fits)


def _random_square(rng: Random) -> str:
    """Draw one of the 161280 squares uniformly.

    Each square results from exactly one reduced square by one permutation of its columns and its lower rows.
    """
    first, *lower = rng.choice(_reduced_squares())
    columns = rng.sample(range(_LATIN_SIZE), _LATIN_SIZE)
    rows = [first, *rng.sample(lower, len(lower))]
    return "".join([row[column] for row in rows for column in columns])


def _combination(rank: int, count: int) -> set[int]:
    """Return the combination of ``count`` of the 25 cells with a rank in ``range(comb(25, count))``."""
    chosen: set[int] = set()
    for cell in range(_NUM_LATIN_CELLS):
        num_with_cell = comb(_NUM_LATIN_CELLS - cell - 1, count - len(chosen) - 1) if len(chosen) < count else 0
        if rank < num_with_cell:
            chosen.add(cell)
        else:
            rank -= num_with_cell
    return chosen


@dataclass(frozen=True, kw_only=True)
class Sudoku(GeneratedTask):
    """Four 4x4 sudokus with nine holes and one solution each, such as ``.13./.3../14../3..4/``.

    Each row, column and 2x2 box contains each digit once. Unlike a Latin square with few clues, a puzzle has one
    correct answer; the difficulty is the order in which its cells can be determined.

    The key determines the solutions. A puzzle has only one solution, so different solutions give different queries.

    Attributes:
        num_grids: Number of puzzles in a query, 1 to 64.
        num_holes: Number of blank cells in each puzzle, 1 to 11.
    """

    num_grids: int = 4
    num_holes: int = 9

    def __post_init__(self) -> None:
        require_between("num_grids", self.num_grids, 1, 64)
        require_between("num_holes", self.num_holes, 1, 11)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """All sequences of solutions."""
        return _NUM_SUDOKUS**self.num_grids

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return puzzles, and their solutions."""
        query = response = ""
        for number in digits(key, _NUM_SUDOKUS, self.num_grids):
            cells = _sudokus()[number]
            shown = rng.sample(range(_NUM_SUDOKU_CELLS), _NUM_SUDOKU_CELLS - self.num_holes)
            while _solutions(cells, shown) != 1 << number:
                shown = rng.sample(range(_NUM_SUDOKU_CELLS), _NUM_SUDOKU_CELLS - self.num_holes)
            query += _to_text(_keep_cells(cells, shown), _SUDOKU_SIZE)
            response += _to_text(cells, _SUDOKU_SIZE)
        return query, response

    def characters(self) -> str:
        """Return digits, blank and row end."""
        return "1234./"


@cache
def _sudokus() -> list[str]:
    """Return the 288 complete grids."""

    def fits(above: _Square, row: str) -> bool:
        box_rows = above[-1:] if len(above) % 2 else ()
        boxes_differ = all(not set(row[:2]) & set(earlier[:2]) for earlier in box_rows)
        return boxes_differ and _columns_differ(above, row)

    return ["".join(square) for square in _all_squares(_SUDOKU_SIZE, fits)]


@cache
def _sudokus_with() -> list[dict[str, int]]:
    """Return for each cell and digit the set of grids with that digit in the cell, as a bit mask over the grids."""
    return [
        {digit: sum(1 << number for number, cells in enumerate(_sudokus()) if cells[cell] == digit) for digit in "1234"}
        for cell in range(_NUM_SUDOKU_CELLS)
    ]


def _solutions(cells: str, shown: list[int]) -> int:
    """Return the set of grids that agree with ``cells`` in the shown cells, as a bit mask over the grids."""
    sudokus_with = _sudokus_with()
    solutions = (1 << _NUM_SUDOKUS) - 1
    for cell in shown:
        solutions &= sudokus_with[cell][cells[cell]]
    return solutions


def _to_text(cells: str, size: int) -> str:
    """Return a grid as text: each row of ``size`` cells ends with a slash."""
    return "".join([cells[start : start + size] + "/" for start in range(0, size * size, size)])


def _keep_cells(cells: str, kept: Collection[int]) -> str:
    """Blank all cells except those with an index in ``kept``."""
    return "".join([cell if index in kept else "." for index, cell in enumerate(cells)])


def _all_squares(size: int, fits: Callable[[_Square, str], bool]) -> list[_Square]:
    """Return all squares whose rows fit, each as a tuple of rows.

    Args:
        size: Number of rows and columns; each row is a permutation of the digits from 1 to ``size``.
        fits: Whether a row may follow the rows above it.
    """
    rows = ["".join(row) for row in permutations("123456789"[:size])]
    squares: list[_Square] = [()]
    for _ in range(size):
        squares = [(*above, row) for above in squares for row in rows if fits(above, row)]
    return squares


def _columns_differ(above: _Square, row: str) -> bool:
    """Return whether a row repeats no digit of the same column in the rows above."""
    return all(cell != other for earlier in above for cell, other in zip(row, earlier, strict=True))


_ROW_LENGTH = 3  # both tasks have three values in a row
_VALUES: dict[type[Task], re.Pattern[str]] = {
    Additions: re.compile(r"\d+"),
    Records: re.compile(r'(?<=":")\w+|(?<=":)\d+'),
}


@dataclass(frozen=True, kw_only=True)
class Spans(Task):
    """Sums or records with one value of each row left out, chosen at random; its examples come from ``task``.

    The query ``12+?,?+78>`` goes with the response ``12+__=46;__+78=134;``, whose blanks are ``34`` and ``56``: the
    right side of a blank says what it holds.

    In sums the query shows ``?`` for an operand that is left out, so that only the given result determines it. The
    query of records stays as it is. Either way there is one right answer.

    Attributes:
        task: The task whose responses get spans to fill in, ``Additions`` or ``Records``.
    """

    task: GeneratedTask = field(default_factory=Additions)

    def __post_init__(self) -> None:
        """Refuse a task whose values are unknown here."""
        names = " or ".join(task.__name__ for task in _VALUES)
        require(type(self.task) in _VALUES, "task.task", names, type(self.task).__name__, "choose one of them")

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split as a lazy sequence, each with the character ranges of its spans.

        Args:
            split: The split.
        """
        return LazyExamples(size=self.task.size(split), make=partial(self._example, split))

    def _example(self, split: Split, index: int) -> Example:
        return self.with_spans(self.task.example(split, index))

    def with_spans(self, example: Example) -> Example:
        """Return an example of ``task`` with a span left out in each row."""
        rng = Random(stable_key("holes", self.task.seed, example.query))
        values = [match.span() for match in _VALUES[type(self.task)].finditer(example.response)]
        rows = [values[start : start + _ROW_LENGTH] for start in range(0, len(values), _ROW_LENGTH)]
        chosen = [rng.randrange(_ROW_LENGTH) for _ in rows]
        query = example.query
        if isinstance(self.task, Additions):
            numbers = re.findall(r"\d+", query)
            shown = [["?" if i == hidden else numbers[2 * row + i] for i in range(2)]
                     for row, hidden in enumerate(chosen)]  # fmt: skip
            query = ",".join(["+".join(pair) for pair in shown]) + ">"
        spans = tuple(row[hidden] for row, hidden in zip(rows, chosen, strict=True))
        return replace(example, query=query, spans=spans)

    def score(self, example: Example, response: str) -> float | None:
        """Return 1 for the right values in the given text, else 0; the task's own rules decide what is equal."""
        return self.task.score(example, response)

    def characters(self) -> str:
        """Return the task's characters and the question mark."""
        return "".join(sorted({*(self.task.characters() or ()), "?"}))
