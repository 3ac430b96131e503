"""Plots as PNG bytes, drawn with matplotlib's object interface: no display and no pyplot state."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from refusion_lit.reports.comparison import Comparison, Grid, MeasuredRow

# Okabe and Ito's palette for colour-blind readers; the marker shapes make methods distinguishable without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A6D00")
_MARKERS = "osD^vPX*"
_TITLES = {"score": "score (%)", "tokens_per_forward": "tokens per forward"}
_MAX_LEGEND_ENTRIES = 24


def tradeoff_plot(comparison: Comparison) -> bytes:
    """Plot score over tokens per forward, with intervals and the Pareto front."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    methods: dict[str, list[MeasuredRow]] = {}
    for m in comparison.measured:
        methods.setdefault(m.row.method, []).append(m)
    front = sorted(_point(m) for m in comparison.measured if m.on_front)
    axes.plot(*zip(*front, strict=True), color="#999999", linewidth=5, alpha=0.35, marker="o", markersize=17,
              zorder=1, label="Pareto front")  # fmt: skip
    for i, (method, rows) in enumerate(methods.items()):
        rows.sort(key=lambda m: m.tokens_per_forward.estimate)
        colour = _COLOURS[i % len(_COLOURS)]
        _draw_points(axes, method, rows, colour, _MARKERS[i % len(_MARKERS)])
        if not comparison.grids:  # points of a grid over two options do not form a curve
            axes.plot(*zip(*map(_point, rows), strict=True), color=colour, linewidth=1, alpha=0.7, zorder=2)
    axes.set_xlabel("tokens per forward (more is faster)")
    axes.set_ylabel("score (%)")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.08)
    if len(methods) <= _MAX_LEGEND_ENTRIES:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9, markerscale=0.8)
    return _png(figure)


def heat_map(grid: Grid) -> bytes:
    """Plot one figure over two options, with its value in every cell."""
    import numpy as np
    from matplotlib.figure import Figure

    values = np.array([[np.nan if v is None else v for v in row] for row in grid.values], dtype=float)
    width = max(4.2, 1.6 + 0.9 * len(grid.x_values))
    figure = Figure(figsize=(width, max(3.0, 1.4 + 0.55 * len(grid.y_values))), dpi=150, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    for (row, column), value in np.ndenumerate(values):
        is_dark = high == low or (value - low) / (high - low) < 0.6
        text = "--" if np.isnan(value) else f"{value:.1f}" if grid.figure == "score" else f"{value:.2f}"
        colour = "#555555" if np.isnan(value) else "white" if is_dark else "black"
        axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(grid.x_values)), [_literal(v) for v in grid.x_values])
    axes.set_yticks(range(len(grid.y_values)), [_literal(v) for v in grid.y_values])
    axes.set_xlabel(_literal(grid.x_name.rsplit(".", 1)[-1]))
    axes.set_ylabel(_literal(grid.y_name.rsplit(".", 1)[-1]))
    axes.set_title(_literal(f"{grid.method}: {_TITLES[grid.figure]}"), fontsize=10)
    figure.colorbar(image, ax=axes)
    return _png(figure)


def _draw_points(axes: Any, method: str, rows: Sequence[MeasuredRow], colour: str, marker: str) -> None:  # noqa: ANN401
    points = list(zip(*map(_point, rows), strict=True))
    errors = {
        f"{axis}err": [
            [max(value.estimate - value.low, 0.0) for value in values],
            [max(value.high - value.estimate, 0.0) for value in values],
        ]
        for axis, values in (("x", [m.tokens_per_forward for m in rows]), ("y", [m.score for m in rows]))
    }
    axes.errorbar(*points, **errors, fmt="none", ecolor=colour, elinewidth=1, alpha=0.6, capsize=2, zorder=2)
    is_marked = any(m.row.mismatches for m in rows)
    axes.plot(*points, linestyle="none", marker=marker, markersize=7, color=colour, zorder=3,
              markerfacecolor="white" if is_marked else colour,
              label=_literal(f"{method} *" if is_marked else method))  # fmt: skip


def _point(measured: MeasuredRow) -> tuple[float, float]:
    return measured.tokens_per_forward.estimate, measured.score.estimate


def _literal(text: str) -> str:
    """Escape ``$``, which starts a formula, and a leading ``_``, which hides an entry from the legend."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _png(figure: Any) -> bytes:  # noqa: ANN401 - matplotlib is imported lazily
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script that the font lacks
        figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
