from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.sweeps import Sweep


def test_points_are_all_combinations_of_grid_entries_and_samples() -> None:
    sweep = Sweep(
        grid={"a": [1, 2], "b": ["x", "y", "z"]},
        entries=[{"c": 1, "d": 10}, {"c": 2, "d": 20}],
        random={"e": {"choice": [7]}},
        num_samples=2,
    )
    found = [tuple(point.values()) for point in sweep.combinations()]
    expected = [
        (c, d, a, b, 7) for (c, d), a, b, _ in itertools.product([(1, 10), (2, 20)], [1, 2], ["x", "y", "z"], range(2))
    ]
    assert found == expected
    assert sweep.swept == ("a", "b", "c", "d", "e")


def test_an_empty_sweep_is_one_point() -> None:
    assert list(Sweep().combinations()) == [{}]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), low=st.floats(1e-6, 1.0), factor=st.floats(1.0, 1e6))
def test_samples_stay_within_their_bounds(seed: int, low: float, factor: float) -> None:
    high = low * factor
    kinds = {"u": {"uniform": [low, high]}, "l": {"log_uniform": [low, high]}, "i": {"integers": [3, 5]}}
    for point in Sweep(random=kinds, num_samples=5, seed=seed).combinations():
        assert low <= point["u"] <= high
        assert low <= point["l"] <= high
        assert point["i"] in (3, 4, 5)


def test_log_uniform_samples_each_decade_equally_often() -> None:
    sweep = Sweep(random={"x": {"log_uniform": [1e-4, 1.0]}}, num_samples=2000)
    values = [point["x"] for point in sweep.combinations()]
    for decade in range(-4, 0):
        share = sum(10.0**decade <= v < 10.0 ** (decade + 1) for v in values) / len(values)
        assert share == pytest.approx(0.25, abs=0.04)  # four standard errors


def test_more_samples_or_options_leave_the_earlier_draws() -> None:
    short = Sweep(random={"x": {"uniform": [0, 1]}}, num_samples=3, seed=5)
    long = Sweep(random={"y": {"uniform": [0, 1]}, "x": {"uniform": [0, 1]}}, num_samples=6, seed=5)
    assert [p["x"] for p in short.combinations()] == [p["x"] for p in long.combinations()][:3]
    other = Sweep(random={"x": {"uniform": [0, 1]}}, num_samples=3, seed=6)
    assert [p["x"] for p in short.combinations()] != [p["x"] for p in other.combinations()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subcommands": ["test", "fit"]}, "subcommands: expected"),
        ({"grid": {"a": []}}, "grid.a: expected a list"),
        ({"grid": {"a": [1]}, "entries": [{"a": 2}]}, "a: expected in one place, got it in grid and in entries"),
        ({"options": {"a": 1}, "random": {"a": {"choice": [1]}}}, "in random and in options"),
        ({"num_samples": 0}, "num_samples"),
        ({"random": {"a": {"normal": [0, 1]}}}, "random.a: expected one of"),
        ({"random": {"a": {"uniform": [2, 1]}}}, r"random.a: expected uniform: \[low, high\]"),
        ({"random": {"a": {"log_uniform": [0, 1]}}}, "numbers above 0"),
        ({"random": {"a": {"integers": [1.5, 3]}}}, "whole numbers"),
        ({"random": {"a": {"uniform": [0, float("inf")]}}}, "in finite numbers, got"),
        ({"random": {"a": {"uniform": [-1e308, 1e308]}}}, "in finite numbers, got"),
        ({"random": {"a": {"uniform": [0, 10**400]}}}, "in finite numbers, got"),
        ({"random": {"a": {"log_uniform": [1, float("inf")]}}}, "in finite numbers above 0, got"),
        ({"random": {"a": {"log_uniform": [1, 10**400]}}}, "in finite numbers above 0, got"),
    ],
)
def test_a_wrong_sweep_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sweep(**options)
