"""The comparison of fresh results with committed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from refusion_lit.reports.write import write_report
from reports.samples import predictions, write_run
from support.modules import load_module

ROOT = Path(__file__).parents[2]
compare = load_module(ROOT / "experiments" / "compare.py")

COMMITTED = {"runs": [{"score": 0.5, "seconds": 3.0}, {"score": 1.0, "seconds": 9.0}]}


@pytest.mark.parametrize(
    ("scores", "tolerance", "num_problems"),
    [
        ([0.5, 1.0], {"absolute": 0.0}, 0),
        ([0.54, 1.0], {"absolute": 0.05}, 0),
        ([0.56, 0.94], {"absolute": 0.05}, 2),
        ([0.54, 1.09], {"relative": 0.1}, 0),
        ([0.56, 1.09], {"relative": 0.1}, 1),
        ([0.56, 1.0], {"relative": 0.1, "absolute": 0.07}, 0),
        ([float("nan"), 1.0], {"absolute": 9.0}, 1),
        ([0.5], {"absolute": 9.0}, 1),
    ],
)
def test_figures_outside_their_tolerance_are_named(
    scores: list[float], tolerance: dict[str, float], num_problems: int
) -> None:
    fresh: dict[str, Any] = {"runs": [{"score": score, "seconds": 1e9} for score in scores]}
    assert len(compare.differences(COMMITTED, fresh, {"runs.*.score": tolerance})) == num_problems


@pytest.mark.parametrize("paths", [{"runs.*.scores": {"absolute": 1}}, {"runs.*.score": {"abs": 1}}, {"runs": {}}])
def test_a_path_or_tolerance_that_means_nothing_is_refused(paths: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"compare\."):
        compare.differences(COMMITTED, COMMITTED, paths)


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("experiments/*/reproduce.yaml")), ids=lambda path: path.parent.name)
def test_a_committed_result_reproduces_itself(recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    committed = json.loads((recipe.parent / values["result"]).read_text())
    assert compare.differences(committed, committed, values["compare"]) == []
    assert values["commands"]
    assert all((recipe.parent / name).is_file() for name in values.get("also", []))


def test_a_recipe_keeps_what_its_report_writes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": predictions([1.0, 0.0])})
    written = {path.name for path in write_report([run], tmp_path, formats=["markdown"])}
    recipes = [yaml.safe_load(path.read_text()) for path in ROOT.glob("experiments/*/reproduce.yaml")]
    reported = [recipe for recipe in recipes if any("refusion-lit report" in command for command in recipe["commands"])]
    assert len(reported) >= 5
    for recipe in reported:
        assert set(recipe["also"]) <= written
