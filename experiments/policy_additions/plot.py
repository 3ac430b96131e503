"""The tables and the plots of both experiments with rewards; `nox -s figures` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

_COLOURS = ("#00796b", "#c2410c", "#1d4ed8", "#6b21a8", "#a3a3a3")
Curves = dict[str, list[tuple[int, float]]]


def rows(before: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for the start and for each training: scores in percent and tokens per forward of both decoders."""
    rows = [["start", *(cell for figures in before.values() for cell in _cells(figures)), ""]]
    for name, run in runs.items():
        cells = [cell for figures in run["after"].values() for cell in _cells(figures)]
        rows.append([name, *cells, f"{run['seconds'] / 60:.1f}" if "seconds" in run else ""])
    return rows


def _cells(figures: Mapping[str, Any]) -> list[str]:
    score = f"{100 * figures['score']:.1f}"
    if "difference_in_points" in figures:
        estimate, low, high = figures["difference_in_points"]
        score += f" ({estimate:+.1f}, {low:+.1f} to {high:+.1f})"
    return [score, f"{figures['tokens_per_forward']:.2f}"]


HEAD: Sequence[str] = ("model", "left to right", "t/f", "thresholds", "t/f", "minutes")


def curves(runs: Mapping[str, Mapping[str, Any]]) -> Curves:
    """Return the rewards of roll-outs by number of updates."""
    return {name: [(point["step"], point["reward"]) for point in run["curve"]] for name, run in runs.items()}


def mean_curves(results: Mapping[str, Mapping[str, Any]]) -> Curves:
    """Return the rewards of roll-outs by number of updates, means over the seeds of each setting."""
    means = {}
    for name, runs in results.items():
        by_point = zip(*curves(runs).values(), strict=True)
        means[name] = [(points[0][0], sum(reward for _, reward in points) / len(points)) for points in by_point]
    return means


def draw(curves: Curves, path: Path) -> None:
    """Draw what :func:`curves` returns."""
    figure, axis = plt.subplots(figsize=(7, 3.2))
    for (name, points), colour in zip(curves.items(), _COLOURS, strict=False):
        axis.plot(*zip(*points, strict=True), label=name, color=colour, linewidth=2)
    axis.set_xlabel("updates")
    axis.set_ylabel("mean reward of roll-outs")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
