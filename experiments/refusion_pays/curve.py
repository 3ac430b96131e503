"""Draws what the conversions make of their positions: accepted drafts while they train, tokens per forward after it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

CHAINS = {
    "windows of 8, then of 4, second round": {
        "chain, windows": None,
        "chain, shorter": "shorter",
        "chain, second round": "second round",
    },
    "windows of 4, second to fourth round": {
        "windows of 4": "windows of 4",
        "windows of 4, second round": "windows of 4, second round",
        "windows of 4, third round": "windows of 4, third round",
        "windows of 4, fourth round": "windows of 4, fourth round",
    },
}
"""Trainings that follow one another, by their name in training.json, with the name of their model in convert.json."""
DECODERS = {"ReFusion bonus 32x1": "o", "SelfSpeculative, one slot": "s"}
_COLOURS = ("#0072b2", "#d55e00")

Points = list[tuple[float, float]]


def points(training: dict[str, Any], measured: dict[str, Any]) -> dict[str, dict[str, Points]]:
    """Return the curves of each chain, over millions of positions computed since the base.

    Args:
        training: Content of training.json.
        measured: Content of convert.json.
    """
    points: dict[str, dict[str, Points]] = {}
    for chain, names in CHAINS.items():
        runs = [training["runs"][name] for name in names]
        ends = list(accumulate((run["num_positions"] / 1e6 for run in runs), initial=0.0))
        points[chain] = {
            "accepted": [
                (start + run["num_positions"] / 1e6 * int(step) / run["num_steps"], sum(shares[:3]))
                for start, run in zip(ends, runs, strict=False)
                for step, shares in run["accepted"].items()
            ]
        }
        for decoder in DECODERS:
            points[chain][decoder] = [
                (end, measured["runs"][model]["decoders"][decoder]["tokens_per_forward"])
                for end, model in zip(ends[1:], names.values(), strict=True)
                if model is not None
            ]
    return points


def draw(points: dict[str, dict[str, Points]], path: Path) -> None:
    """Draw what :func:`points` returns."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5.4), sharex=True)
    for (chain, curves), colour in zip(points.items(), _COLOURS, strict=True):
        above.plot(*zip(*curves["accepted"], strict=True), label=chain, color=colour, linewidth=2, marker=".")
        for decoder, marker in DECODERS.items():
            style = "-" if marker == "o" else ":"
            label = f"{decoder}, {chain.partition(',')[0]}"
            below.plot(*zip(*curves[decoder], strict=True), style, marker=marker, color=colour, label=label)
    above.set_ylabel("accepted of three drafts,\nvalidation")
    below.set_ylabel("tokens per forward,\n24 test prompts")
    below.set_xlabel("million positions")
    below.axhline(2.0, color="#5b6570", linewidth=1, linestyle="--")
    for axis, place in ((above, "upper left"), (below, "lower right")):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8, loc=place)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
