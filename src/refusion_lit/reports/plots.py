"""Plots as SVG, drawn by matplotlib: every point has a title that says what it is, shown under the mouse."""

from __future__ import annotations

import csv
import io
import math
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from refusion_lit.reports.comparison import Comparison, ComparisonRow
from refusion_lit.reports.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = {"train/reward": "reward", "train/loss": "training loss", "val/loss": "validation loss"}
"""Columns that are shown, where a training logged them, with their names."""
_MAX_POINTS = 60
"""Of a curve; longer ones are drawn as means over neighbours."""
Curve = list[tuple[float, float]]

_DPI = 72  # a point of matplotlib is a pixel then
_WIDTH = 900
_HEIGHT = 440
_LEGEND_LINE = 20
_CHARACTER_WIDTH = 7
_MAX_LEGEND_ENTRIES = 24
_MAX_NAME_LENGTH = 60

# Methods differ without colour, too. The colours are Okabe and Ito's, for colour-blind readers.
_MARKERS = "os^DvPX*p"  # one more than colours, so that 72 methods differ
_NUM_COLOURS = 8
_LIGHT = {
    "paper": "#ffffff", "ink": "#1b2430", "soft": "#5b6570", "line": "#dfe3e8", "front": "#8a929b",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#009e73", "c3": "#c05a92",
    "c4": "#b97f00", "c5": "#2b8cc4", "c6": "#000000", "c7": "#8a6d00",
}  # fmt: skip
_DARK = {
    "paper": "#14171b", "ink": "#e8eaed", "soft": "#a3adb8", "line": "#333b45", "front": "#7d8894",
    "c0": "#5aaee8", "c1": "#f58f4c", "c2": "#3ec79a", "c3": "#e39cc5",
    "c4": "#f5b83d", "c5": "#9bd7fa", "c6": "#ffffff", "c7": "#c9a93a",
}  # fmt: skip


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


STYLE = f"""
.plot {{ {_variables(_LIGHT)} font-family: system-ui, "Segoe UI", Roboto, sans-serif; }}
@media (prefers-color-scheme: dark) {{ .plot {{ {_variables(_DARK)} }} }}
.plot * {{ stroke-linejoin: round; stroke-linecap: butt; }}
.plot text {{ pointer-events: none; }}
.plot .paper {{ fill: var(--paper); }}
.plot .point:hover use {{ fill: var(--ink) !important; fill-opacity: .14 !important; }}
"""
"""Style of all plots, for light and dark pages."""

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "refusion-lit", "text.parse_math": False, "font.size": 12,
    "font.family": "DejaVu Sans", "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "text.color": _LIGHT["ink"], "xtick.labelcolor": _LIGHT["ink"], "ytick.labelcolor": _LIGHT["ink"],
    "axes.labelcolor": _LIGHT["soft"], "axes.edgecolor": _LIGHT["soft"], "xtick.color": _LIGHT["soft"],
    "ytick.color": _LIGHT["soft"], "grid.color": _LIGHT["line"],
}  # fmt: skip


def tradeoff_plot(comparison: Comparison) -> str:
    """Plot score over tokens per forward, with intervals and the Pareto front, as an SVG element."""
    methods: dict[str, list[ComparisonRow]] = {}
    for m in comparison.rows:
        methods.setdefault(m.method, []).append(m)
    names = [f"{_shown(method)}{' *' * any(m.mismatches for m in rows)}" for method, rows in methods.items()]
    front = sorted(_place(m) for m in comparison.rows if m.on_front)
    with _figure(names) as (figure, ax):
        ax.set_xlabel("tokens per forward (more is faster)")
        ax.set_ylabel("score in %")
        if len(comparison.rows) > 1:
            ax.plot(*zip(*front, strict=True), "o-", color=_LIGHT["front"], alpha=0.35, linewidth=7, markersize=22,
                    markerfacecolor="none", markeredgewidth=3, clip_on=False)  # fmt: skip
        for number, rows in enumerate(methods.values()):
            if len(rows) > 1 and len(rows[0].options) < 2:  # points over two options do not form a curve
                ax.plot(*zip(*sorted(map(_place, rows)), strict=True), color=_colour(number), alpha=0.6, linewidth=1)
            for m in rows:
                _draw_point(ax, m, number)
        titles = {f"point-{i}": describe(m, comparison) for i, m in enumerate(comparison.rows)}
        for gid, m in zip(titles, comparison.rows, strict=True):
            ax.plot(*_place(m), "o", color=_LIGHT["ink"], markersize=26, alpha=0, gid=gid, zorder=9, clip_on=False)
        ax.set_xlim(left=max(ax.get_xlim()[0], 0))
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -2), min(high, 102))
        title = f"Score in percent over tokens per forward of {len(comparison.rows)} rows; the table has the values"
        return _svg(figure, title, titles)


def curves_plot(curves: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> str:
    """Plot one figure over another, a line for each name, as an SVG element.

    Args:
        curves: Points in the order of the line, by name; at least one point.
        x_name: What the horizontal axis shows, with its unit.
        y_name: What the vertical axis shows, with its unit.
    """
    titles = {}
    with _figure(list(map(_shown, curves))) as (figure, ax):
        ax.set_xlabel(x_name)
        ax.set_ylabel(y_name)
        for number, (name, points) in enumerate(curves.items()):
            ax.plot(*zip(*points, strict=True), color=_colour(number), linewidth=1.2)
            for x, y in points:
                gid = f"point-{len(titles)}"
                titles[gid] = f"{name}: {y_name} {y:.4g} at {x_name} {x:g}"
                ax.plot(x, y, _MARKERS[number % len(_MARKERS)], color=_colour(number), gid=gid, clip_on=False)
        return _svg(figure, f"{y_name} over {x_name}", titles)


def training_plots(runs: Sequence[Run]) -> list[str]:
    """Return a plot for each figure of the runs' trainings, as SVG elements; none where no training is found.

    A test of a checkpoint finds the training in the checkpoint's directory. Tests of one training share a curve.
    """
    checkpoints = [run.results["config"].get("ckpt_path") for run in runs]
    directories = dict.fromkeys(Path(path).resolve().parent.parent for path in checkpoints if isinstance(path, str))
    files = {directory: directory / "metrics.csv" for directory in directories}
    names = {directory: f"{directory.parent.name}/{directory.name}" for directory in files}
    if len({*names.values()}) < len(names):  # of the same name in different places
        names = {directory: str(directory) for directory in files}
    found = {names[directory]: _columns(path) for directory, path in files.items() if path.is_file()}
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


def describe(row: ComparisonRow, comparison: Comparison) -> str:
    """Return what a point is, in one line."""
    options = ", ".join(f"{comparison.option_names[name]} {value}" for name, value in row.options.items())
    name = f"{row.name} ({options})" if options else row.name
    both = (row.score, row.tokens_per_forward)
    digits = (1, 2)
    ranges = [
        f" ({v.low:.{n}f} to {v.high:.{n}f})" if row.has_intervals else "" for v, n in zip(both, digits, strict=True)
    ]
    figures = f"score {both[0].estimate:.1f} %{ranges[0]}, {both[1].estimate:.2f} tokens per forward{ranges[1]}"
    return f"{name}: {figures}, {comparison.prompts_of(row)} prompts"


def standalone(picture: str) -> str:
    """Return a picture with its style and background, as the content of a file."""
    start = picture.index(">") + 1
    style = f'<style>{STYLE}</style><rect class="paper" width="100%" height="100%"/>'
    return f"{picture[:start]}{style}{picture[start:]}\n"


def _draw_point(ax: Axes, m: ComparisonRow, number: int) -> None:
    """Draw a row's intervals and its marker, which is hollow if the model was not trained for the decoder."""
    x, y = _place(m)
    style: dict[str, Any] = {"color": _colour(number), "clip_on": False}
    ax.plot([m.tokens_per_forward.low, m.tokens_per_forward.high], [y, y], linewidth=1, **style)
    ax.plot([x, x], [m.score.low, m.score.high], linewidth=1, **style)
    inside = _LIGHT["paper"] if m.mismatches else _colour(number)
    ax.plot(x, y, _MARKERS[number % len(_MARKERS)], markersize=9, markerfacecolor=inside, gid="marker", **style)


@contextmanager
def _figure(names: Sequence[str]) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure with its axes, under a legend of the names in the order of their colours."""
    import matplotlib as mpl  # takes most of a second, so only where something is drawn
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = names if len(names) <= _MAX_LEGEND_ENTRIES else []
    num_columns = max(1, _WIDTH // (46 + _CHARACTER_WIDTH * max(map(len, names), default=0)))
    height = _HEIGHT + _LEGEND_LINE * -(-len(names) // num_columns)
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's fonts draw the texts, not matplotlib's
        figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
        ax = figure.add_subplot()
        handles = [Line2D([], [], color=_colour(i), marker=_MARKERS[i % len(_MARKERS)]) for i in range(len(names))]
        if names:
            legend = figure.legend(handles, map(str, range(len(names))), loc="outside upper left", ncols=num_columns)
            for text, name in zip(legend.get_texts(), names, strict=True):
                text.set_text(name)  # given at once, a name that starts with _ would be left out
        yield figure, ax


def _svg(figure: Figure, description: str, titles: Mapping[str, str]) -> str:
    """Return a figure as an SVG element to put into a page; see :func:`standalone` for a file.

    Args:
        figure: The figure.
        description: What the picture shows, for readers that do not see it.
        titles: Titles of artists by their ids.
    """
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    for prefix, name in (("", "http://www.w3.org/2000/svg"), ("xlink", "http://www.w3.org/1999/xlink")):
        ElementTree.register_namespace(prefix, name)
    root = ElementTree.fromstring(written.getvalue())
    namespace = root.tag.removesuffix("svg")
    root.remove(root[0])  # matplotlib's style, which would hold for the whole page
    for element in root.iter():
        if element.tag == f"{namespace}g" and (gid := element.attrib.pop("id", "")):  # pages have several pictures
            if gid in titles:
                title = ElementTree.Element(f"{namespace}title")
                title.text = _printable(titles[gid])
                element.insert(0, title)
                element.set("class", "point")
            elif gid == "marker":
                element.set("class", gid)
        if style := element.get("style"):
            for name, colour in _LIGHT.items():
                style = style.replace(colour, f"var(--{name})")
            element.set("style", style.replace(" font-family: 'DejaVu Sans';", ""))
    width = root.get("viewBox", "").split()[2]
    for name in ("width", "height"):
        del root.attrib[name]
    root.attrib |= {"class": "plot", "role": "img", "aria-label": _printable(description)}
    root.set("style", f"max-width:100%;width:{width}px;height:auto")
    return ElementTree.tostring(root, encoding="unicode")


def _place(m: ComparisonRow) -> tuple[float, float]:
    return m.tokens_per_forward.estimate, m.score.estimate


def _colour(number: int) -> str:
    return _LIGHT[f"c{number % _NUM_COLOURS}"]


def _shown(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= _MAX_NAME_LENGTH else f"{text[: _MAX_NAME_LENGTH - 1]}…"


def _printable(text: str) -> str:
    """Replace control characters and lone surrogates, which XML has not, escaped or not."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
