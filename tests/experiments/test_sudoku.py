"""The task Sudoku: puzzles of 4 x 4 cells with exactly one solution."""

from __future__ import annotations

import re

from experiments.tasks import Sudoku
from hypothesis import given
from hypothesis import strategies as st

from tasks.samples import completions


def peers(cell: int) -> list[int]:
    """Return the cells in the same row, column or box."""
    row, column = divmod(cell, 4)
    box = (row // 2, column // 2)
    return [
        other for other in range(16) if other // 4 == row or other % 4 == column or (other // 8, other % 4 // 2) == box
    ]


def solutions(cells: str) -> list[str]:
    return list(completions(cells, "1234", peers))


@given(index=st.integers(0, 199_999), seed=st.integers(), num_holes=st.integers(1, 11))
def test_each_puzzle_has_exactly_the_solution_given(index: int, seed: int, num_holes: int) -> None:
    example = Sudoku(seed=seed, num_holes=num_holes).examples("train")[index]
    assert re.fullmatch(r"([1-4.]{4}/){16}", example.query)
    assert len(example.query) == len(example.response)
    asked, answered = (text.replace("/", "") for text in (example.query, example.response))
    for start in range(0, 64, 16):
        puzzle = asked[start : start + 16]
        assert puzzle.count(".") == num_holes
        assert solutions(puzzle) == [answered[start : start + 16]]


def test_the_default_has_nine_holes_in_any_cell() -> None:
    examples = Sudoku().examples("train")[:300]
    for index in range(80):
        holes = sum(example.query[index] == "." for example in examples)
        if index % 5 == 4:  # the end of a row of four cells
            assert holes == 0
        else:
            assert 100 < holes < 240  # 169 expected, deviation 9


def test_all_grids_are_used() -> None:
    assert len(solutions("." * 16)) == 288
    task = Sudoku(num_grids=1, num_train=96, num_validation=96, num_test=96)
    drawn = [e.response.replace("/", "") for split in ("train", "validation", "test") for e in task.examples(split)]
    assert sorted(drawn) == sorted(solutions("." * 16))
