from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.tasks import Sudoku


def solutions(cells: str) -> Iterator[str]:
    """Fill in the first blank in every way that repeats no digit in its row, column and box."""
    if "." not in cells:
        yield cells
        return
    place = cells.index(".")
    row, column = divmod(place, 4)
    seen = {
        cells[other]
        for other in range(16)
        if other // 4 == row or other % 4 == column or (other // 8, other % 4 // 2) == (row // 2, column // 2)
    }
    for digit in sorted(set("1234") - seen):
        yield from solutions(cells[:place] + digit + cells[place + 1 :])


@given(index=st.integers(0, 199_999), seed=st.integers(), num_holes=st.integers(1, 11))
def test_each_puzzle_has_exactly_the_solution_given(index: int, seed: int, num_holes: int) -> None:
    example = Sudoku(seed=seed, num_holes=num_holes).examples("train")[index]
    assert re.fullmatch(r"([1-4.]{4}/){16}", example.query)
    assert len(example.query) == len(example.response)
    asked, answered = (text.replace("/", "") for text in (example.query, example.response))
    for start in range(0, 64, 16):
        puzzle = asked[start : start + 16]
        assert puzzle.count(".") == num_holes
        assert list(solutions(puzzle)) == [answered[start : start + 16]]


def test_default_has_nine_holes_in_any_place() -> None:
    examples = Sudoku().examples("train")[:300]
    for place in range(80):
        holes = sum(example.query[place] == "." for example in examples)
        assert holes == 0 if place % 5 == 4 else 100 < holes < 240  # 169 expected, deviation 9


def test_all_grids_are_used() -> None:
    assert len(list(solutions("." * 16))) == 288
    task = Sudoku(num_grids=1, num_train=96, num_validation=96, num_test=96)
    drawn = [e.response.replace("/", "") for split in ("train", "validation", "test") for e in task.examples(split)]
    assert sorted(drawn) == sorted(solutions("." * 16))


@pytest.mark.parametrize("options", [{"num_grids": 0}, {"num_holes": 0}, {"num_holes": 12}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: expected an integer from 1 to"):
        Sudoku(**options)
