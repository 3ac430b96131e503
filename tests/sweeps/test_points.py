"""A sweep's points: combinations of options, their configs and their ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from refusion_lit.reports.results import shorten_value
from refusion_lit.sweeps.points import Sweep, overlay, plan
from sweeps.conftest import resolve


def test_points_are_all_combinations_of_entries_and_grid() -> None:
    sweep = Sweep(grid={"a": [1, 2], "b": ["x", "y", "z"]}, entries=[{"c": 1, "d": 10}, {"c": 2, "d": 20}])
    actual = [(point["c"], point["d"], point["a"], point["b"]) for point in sweep.combinations()]
    assert actual == [(c, 10 * c, a, b) for c in (1, 2) for a in (1, 2) for b in "xyz"]
    assert sweep.option_names == ("a", "b", "c", "d")
    assert list(Sweep().combinations()) == [{}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subcommands": ["test", "fit"]}, "subcommands: expected"),
        ({"grid": {"a": []}}, "grid.a: expected a list"),
        (
            {"grid": {"a": [1]}, "entries": [{"a": 2}]},
            "a: expected once, got it in grid and in entries; remove it from entries",
        ),
        ({"options": {"a": 1}, "grid": {"a": [1]}}, "in grid and in options"),
    ],
)
def test_a_wrong_sweep_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sweep(**options)


def test_overlay_merges_groups_and_replaces_components() -> None:
    below = {"a": {"class_path": "A", "init_args": {"x": 1, "y": 2}}, "b": {"c": 1}}
    assert overlay(below, {"a": {"init_args": {"x": 5}}, "b": {"d": 2}}) == {
        "a": {"class_path": "A", "init_args": {"x": 5, "y": 2}},
        "b": {"c": 1, "d": 2},
    }
    assert overlay(below, {"a": {"class_path": "B"}})["a"] == {"class_path": "B"}


def test_the_id_is_a_hash_of_the_resolved_config(tmp_path: Path) -> None:
    def ids(**options: Any) -> list[str]:
        return [point.id for point in plan(Sweep(**options), tmp_path, resolve)]

    first = ids(options={"x": 1})
    assert ids(options={"x": 1, "waits_for": None}) == first  # an explicit default
    assert ids(grid={"x": [2, 1, 1]})[1:] == first  # the same value from a grid; repeated values are one point
    assert ids(options={"x": 1, "runs_dir": "elsewhere"}) == first  # a location
    assert ids(options={"x": 1, "seed_everything": 1}) != first
    assert ids(options={"x": 1}, subcommands=["fit", "test"]) != first


def test_options_of_one_subcommand_and_paths_relative_to_the_sweep_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("x: 1\ngroup: {a: 1}\n")
    sweep = Sweep(
        base=["base.yaml"],
        subcommands=["fit", "test"],
        options={"fit.x": 2, "test.x": 3, "group.file": "./some.txt", "group.name": "some.txt"},
    )
    (point,) = plan(sweep, tmp_path, resolve)
    assert (point.configs["fit"]["x"], point.configs["test"]["x"]) == (2, 3)
    config = point.configs["test"]
    names = ("group", "group.file", "group.name")
    assert [config[name] for name in names] == [{"a": 1}, str(tmp_path / "some.txt"), "some.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": {"x": [1], "y": [2]}}, "point x=1, y=2: y is not expected"),
        ({"base": ["none.yaml"]}, "base: expected a YAML file"),
        (
            {"options": {"fit.x": 1}},
            "fit.x: expected a subcommand of this sweep .*, got 'fit'; remove the option",
        ),
    ],
)
def test_wrong_points_are_refused_by_name(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan(Sweep(**options), tmp_path, resolve)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        ("name", "name"),
        ([4, None], "[4, null]"),
        (
            {"class_path": "a.b.Hybrid", "init_args": {"eps": 0.5, "inner": {"class_path": "X"}}},
            "Hybrid(eps=0.5, inner=X)",
        ),
        ({"class_path": "Autoregressive"}, "Autoregressive"),
        ({"mine": {"class_path": "LLaDA", "init_args": {"steps": 2}}}, "{mine: LLaDA(steps=2)}"),
        ("a" * 41, "a" * 37 + "..."),
    ],
)
def test_values_in_short(value: Any, text: str) -> None:
    assert shorten_value(value) == text


def test_overrides_replace_options_wherever_they_stand_and_lists_become_a_grid() -> None:
    sweep = Sweep(options={"a": 1}, grid={"b": [1, 2]}, entries=[{"c": 1, "d": 1}, {"c": 2, "d": 2}])
    changed = sweep.override({"a": [3, 4], "b": 5, "c": 6})
    assert (changed.options, changed.grid) == ({"b": 5, "c": 6}, {"a": [3, 4]})
    assert changed.entries == [{"d": 1}, {"d": 2}]
    assert sweep.override({}) == sweep
