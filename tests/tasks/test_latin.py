from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.tasks import Latin
from refusion_lit.tasks.latin import _combination, _random_square, _reduced_squares
from refusion_lit.types import Example


def completions(cells: str) -> Iterator[str]:
    """Fill in the first blank in every way that repeats no digit in its row and column."""
    if "." not in cells:
        yield cells
        return
    place = cells.index(".")
    row, column = divmod(place, 5)
    for digit in "12345":
        if digit not in cells[5 * row : 5 * row + 5] and digit not in cells[column::5]:
            yield from completions(cells[:place] + digit + cells[place + 1 :])


def grids_of(text: str) -> list[str]:
    cells = text.replace("/", "")
    return [cells[start : start + 25] for start in range(0, len(cells), 25)]


def with_rows(grids: list[str]) -> str:
    return "".join(grid[start : start + 5] + "/" for grid in grids for start in range(0, 25, 5))


@given(index=st.integers(0, 199_999), seed=st.integers())
def test_two_squares_with_four_clues_each(index: int, seed: int) -> None:
    example = Latin(seed=seed).examples("train")[index]
    assert re.fullmatch(r"([1-5.]{5}/){10}", example.query)
    assert re.fullmatch(r"([1-5]{5}/){10}", example.response)
    for asked, answered in zip(grids_of(example.query), grids_of(example.response), strict=True):
        assert 25 - asked.count(".") == 4
        assert all(a in (".", b) for a, b in zip(asked, answered, strict=True))
        for i in range(5):
            assert set(answered[5 * i : 5 * i + 5]) == set(answered[i::5]) == set("12345")


@given(index=st.integers(0, 199_999), which=st.integers(0, 50))
def test_another_completion_is_right_and_one_against_the_clues_is_not(index: int, which: int) -> None:
    task = Latin()
    example = task.examples("train")[index]
    others = [list(islice(completions(grid), 51))[which] for grid in grids_of(example.query)]
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


def test_squares_are_drawn_from_all_of_them() -> None:
    # 56 reduced squares of order 5; 56 * 5! * 4! = 161280 squares (OEIS A000315, A002860).
    reduced = _reduced_squares()
    assert len(set(reduced)) == len(reduced) == 56
    rng = random.Random(0)
    drawn = [_random_square(rng) for _ in range(4000)]
    # Of 4000 uniform draws about 4000**2 / 2 / 161280 = 49.6 repeat an earlier one.
    assert 25 < 4000 - len(set(drawn)) < 80
    for place in range(25):
        assert min(Counter(square[place] for square in drawn).values()) > 650  # 800 expected, deviation 25


@pytest.mark.parametrize("count", [1, 2, 4, 23, 24])
def test_combinations_are_each_choice_once(count: int) -> None:
    choices = {frozenset(_combination(rank, count)) for rank in range(comb(25, count))}
    assert len(choices) == comb(25, count)
    assert all(len(choice) == count and choice <= set(range(25)) for choice in choices)


@pytest.mark.parametrize("options", [{"num_grids": 0}, {"num_clues": 0}, {"num_clues": 25}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: expected an integer from 1 to"):
        Latin(**options)
