"""How the comparison chooses the settings that it shows."""

from __future__ import annotations

from typing import Any

import pytest
from experiments.controlled_comparison.plot import choose_setting

CLASSES = {"a_1": "ReFusion", "a_2": "ReFusion", "b_1": "LLaDA", "a_next": "Autoregressive"}


def run(seed: int, validation: dict[str, float], test: dict[str, float], **changes: Any) -> dict[str, Any]:
    def figures(scores: dict[str, float]) -> dict[str, dict[str, float]]:
        return {
            name: {"score": score, "tokens_per_forward": float(name[-1] == "2"), "positions_per_token": 1.0,
                   "num_prompts": 10}
            for name, score in scores.items()
        }  # fmt: skip

    return {
        "task": "walk", "objective": "hybrid", "seed": seed, "budget_factor": 1.0,
        "decoders": {name: {"class": CLASSES[name]} for name in test},
        "validation": figures(validation), "results": figures(test), **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("validation", "settings", "chosen"),
    [
        ({"a_1": 0.9, "a_2": 0.8, "b_1": 1.0, "a_next": 1.0}, "a", "a_1"),  # next-token decoding is no setting
        ({"a_1": 0.8, "a_2": 0.8, "b_1": 1.0, "a_next": 1.0}, "a", "a_2"),  # more tokens per forward pass
        ({"a_1": 0.9, "a_2": 0.8, "b_1": 1.0, "a_next": 1.0}, ("a_2", "b"), "b_1"),
        ({"a_1": 0.9, "a_2": 0.8, "b_1": 1.0, "a_next": 1.0}, "a_2", "a_2"),
        ({"a_1": 0.9, "a_2": 0.8, "b_1": 1.0, "a_next": 1.0}, "c", None),
    ],
)
def test_validation_prompts_choose_the_setting(
    validation: dict[str, float], settings: str | tuple[str, ...], chosen: str | None
) -> None:
    opposite = {name: 1 - score for name, score in validation.items()}
    assert choose_setting([run(0, validation, opposite)], "walk", "hybrid", settings) == chosen


def test_the_mean_over_seeds_decides_and_other_runs_do_not_count() -> None:
    runs = [
        run(0, {"a_1": 1.0, "a_2": 0.5}, {"a_1": 0.5, "a_2": 0.5}),
        run(1, {"a_1": 0.0, "a_2": 0.6}, {"a_1": 0.5, "a_2": 0.7}),
        run(0, {"a_1": 1.0, "a_2": 0.0}, {"a_1": 0.5, "a_2": 0.5}, budget_factor=2.0),
        run(0, {"a_1": 1.0, "a_2": 0.0}, {"a_1": 0.5, "a_2": 0.5}, task="sheet"),
    ]
    assert choose_setting(runs, "walk", "hybrid", "a") == "a_2"
