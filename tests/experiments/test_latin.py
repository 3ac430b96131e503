"""The task Latin: squares to complete from clues, drawn uniformly."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from math import comb

import pytest
from experiments.tasks import Latin
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.tasks import SPLITS, Example
from tasks.samples import completions


def peers(cell: int) -> list[int]:
    """Return the cells in the same row or column."""
    return [other for other in range(25) if other // 5 == cell // 5 or other % 5 == cell % 5]


def split_grids(text: str) -> list[str]:
    cells = text.replace("/", "")
    return [cells[start : start + 25] for start in range(0, len(cells), 25)]


def with_rows(grids: list[str]) -> str:
    return "".join(grid[start : start + 5] + "/" for grid in grids for start in range(0, 25, 5))


@given(index=st.integers(0, 199_999), seed=st.integers())
def test_two_squares_with_four_clues_each(index: int, seed: int) -> None:
    example = Latin(seed=seed).examples("train")[index]
    assert re.fullmatch(r"([1-5.]{5}/){10}", example.query)
    assert re.fullmatch(r"([1-5]{5}/){10}", example.response)
    for asked, answered in zip(split_grids(example.query), split_grids(example.response), strict=True):
        assert 25 - asked.count(".") == 4
        assert all(a in (".", b) for a, b in zip(asked, answered, strict=True))
        for i in range(5):
            assert set(answered[5 * i : 5 * i + 5]) == set(answered[i::5]) == set("12345")


@given(index=st.integers(0, 199_999), number=st.integers(0, 50))
def test_another_completion_is_right_and_one_against_the_clues_is_not(index: int, number: int) -> None:
    task = Latin()
    example = task.examples("train")[index]
    others = [next(islice(completions(grid, "12345", peers), number, None)) for grid in split_grids(example.query)]
    assert task.score(example, with_rows(others)) == 1.0
    swapped = with_rows(others).translate(str.maketrans("12345", "23451"))  # Latin, but every clue is wrong
    assert task.score(example, swapped) == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("12345/23451/34512/45123/51234/", 1.0),
        ("12345/34512/23451/45123/51234/", 1.0),
        ("12345/23451/34512/45123/51234", 0.0),  # no end
        ("12345/23451/34512/45123/5123//", 0.0),
        ("12345/12345/12345/12345/12345/", 0.0),  # right rows, wrong columns
        ("11111/22222/33333/44444/55555/", 0.0),  # right columns, wrong rows
        ("1234523451/34512/45123/51234//", 0.0),
        ("12345/23451/34512/45123/5123./", 0.0),
        ("21345/13452/34521/45213/52134/", 0.0),  # Latin, wrong clue
    ],
)
def test_constraints(response: str, score: float) -> None:
    example = Example(id="x", query="1..../...../...../...../...../", response="unused")
    assert Latin(num_grids=1, num_train=0).score(example, response) == score


def test_squares_are_drawn_uniformly() -> None:
    # There are 161280 Latin squares of order 5 (OEIS A002860).
    task = Latin(num_grids=1, num_clues=4, num_train=4000)
    drawn = [example.response.replace("/", "") for example in task.examples("train")]
    # Of 4000 uniform draws about 4000**2 / 2 / 161280 = 49.6 repeat an earlier one, with a deviation of 7.
    assert 25 < 4000 - len(set(drawn)) < 80
    for cell in range(25):
        assert min(Counter(square[cell] for square in drawn).values()) > 650  # 800 expected, deviation 25


@pytest.mark.parametrize("num_clues", [1, 2, 3, 23, 24])
def test_every_choice_of_clue_cells_occurs_once(num_clues: int) -> None:
    size = comb(25, num_clues) // 3
    task = Latin(num_grids=1, num_clues=num_clues, num_train=size, num_validation=size, num_test=size)
    queries = [example.query.replace("/", "") for split in SPLITS for example in task.examples(split)]
    choices = {frozenset(i for i in range(25) if query[i] != ".") for query in queries}
    assert len(choices) == 3 * size
    assert all(len(choice) == num_clues for choice in choices)
