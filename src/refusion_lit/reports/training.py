"""Curves of the trainings whose checkpoints were tested, from their ``metrics.csv``."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from refusion_lit.reports.plots import curves_plot
from refusion_lit.reports.runs import Run

FIGURES = {"train/reward": "reward", "train/loss": "training loss", "val/loss": "validation loss"}
"""Columns that are shown, where a training logged them, with their names."""
_MAX_POINTS = 60
"""Of a curve; longer ones are drawn as means over neighbours."""

Curve = list[tuple[float, float]]


def training_plots(runs: Sequence[Run]) -> list[str]:
    """Return a plot for each figure of the runs' trainings, as SVG elements; none where no training is found.

    A test of a checkpoint finds the training in the checkpoint's directory. Tests of one training share a curve.
    """
    files: dict[Path, str] = {}
    for run in runs:
        checkpoint = (run.results.get("config") or {}).get("ckpt_path")
        if isinstance(checkpoint, str):
            directory = Path(checkpoint).resolve().parents[1]
            files.setdefault(directory / "metrics.csv", f"{directory.parent.name}/{directory.name}")
    found = {name: _columns(path) for path, name in files.items() if path.is_file()}
    plots = []
    for column, label in FIGURES.items():
        curves = {name: columns[column] for name, columns in found.items() if len(columns[column]) > 1}
        plots += [curves_plot(curves, "step", label)] if curves else []
    return plots


def _columns(path: Path) -> dict[str, Curve]:
    """Return the curve of each figure; cells that are no finite numbers are left out."""
    curves: dict[str, Curve] = {column: [] for column in FIGURES}
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        for row in csv.DictReader(lines):
            for column, curve in curves.items():
                try:
                    point = float(row.get("step") or "nan"), float(row.get(column) or "nan")
                except ValueError:
                    continue
                if all(map(math.isfinite, point)):
                    curve.append(point)
    return {column: _thinned(curve) for column, curve in curves.items()}


def _thinned(curve: Curve) -> Curve:
    size = -(-len(curve) // _MAX_POINTS)
    parts = [curve[start : start + size] for start in range(0, len(curve), max(size, 1))]
    return [(fmean(step for step, _ in part), fmean(value for _, value in part)) for part in parts]
