"""Plots with matplotlib: SVG with titles of points shown under the mouse, and PDF or PNG for papers."""

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

from refusion_lit.reports.comparison import Comparison
from refusion_lit.reports.intervals import Interval
from refusion_lit.reports.rows import ReportRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAINING_COLUMNS = {"train/reward": "reward", "train/loss": "training loss", "val/loss": "validation loss"}
"""Plotted columns in a training's ``metrics.csv``, with their names."""
_MAX_POINTS = 60
"""Maximum number of points per curve; longer curves are drawn as means over neighbours."""
_MAX_LEGEND_ENTRIES = 24
_MAX_NAME_LENGTH = 60
Curve = list[tuple[float, float]]

# Methods differ without colour, too. The colours are Okabe and Ito's, for colour-blind readers, with more contrast.
_MARKERS = "os^DvPX*p"  # one more than colours, so that 72 methods differ
_COLOURS = ("#0072b2", "#c05000", "#00805f", "#b04f8f", "#8f6400", "#5e2ca5", "#000000", "#7a6200")
_GREY = "#6a727b"
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "refusion-lit", "text.parse_math": False, "font.size": 12,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#dfe3e8",
}  # fmt: skip

STYLE = """
@media (prefers-color-scheme: dark) { .plot { filter: invert(0.9) hue-rotate(180deg); } }
.plot text { pointer-events: none; }
"""
"""Style for plots in a page. A dark page inverts the plots, which are drawn on white."""


def tradeoff_plot(comparison: Comparison, form: str = "svg") -> bytes:
    """Plot score over tokens per forward with intervals and Pareto front; return an SVG, PDF or PNG file."""
    methods: dict[str, list[ReportRow]] = {}
    for row in comparison.rows:
        methods.setdefault(row.method, []).append(row)
    names = [
        f"{method}{rows[0].title.removeprefix(rows[0].name)}{' *' * any(row.mismatches for row in rows)}"
        for method, rows in methods.items()
    ]
    numbers = {method: number for number, method in enumerate(methods)}
    front = sorted(_coordinates(row) for row in comparison.rows if row.on_front)
    titles = [_describe_point(row) for row in comparison.rows]
    with _figure(names, "tokens per forward", "score in %") as (figure, ax):
        if len(comparison.rows) > 1:
            ax.plot(*zip(*front, strict=True), "o-", color=_GREY, alpha=0.35, linewidth=7, markersize=22,
                    markerfacecolor="none", markeredgewidth=3, clip_on=False)  # fmt: skip
        for number, rows in enumerate(methods.values()):
            if len(rows) > 1 and len(rows[0].options) < 2:  # points over two options do not form a curve
                line = zip(*sorted(map(_coordinates, rows)), strict=True)
                ax.plot(*line, **_style(number, ""), alpha=0.6, linewidth=1)
        _draw_scores(ax, comparison.rows, [(numbers[row.method], row.tokens_per_forward) for row in comparison.rows])
        ax.set_xlim(left=max(ax.get_xlim()[0], 0))
        title = f"Score in percent over tokens per forward of {len(comparison.rows)} rows; the table has the values"
        return _save(figure, title, titles, form)


def speed_plot(comparison: Comparison) -> str:
    """Plot score over tokens per second, one prompt at a time, with intervals; return an SVG element.

    The horizontal interval is the interval of the ratio to the baseline, at the baseline's speed. Rows without a
    measured speed are left out.
    """
    from matplotlib.ticker import LogFormatter

    rows = [row for row in comparison.rows if "1" in row.latency]
    speeds = [row.latency["1"]["tokens_per_second"] for row in rows]
    ratios = [Interval(*row.latency["1"]["times_baseline"]) for row in rows]
    titles = [
        f"{row.title}: score {row.score.estimate:.1f} %, {speed:.0f} tokens/s alone, {ratio.estimate:.2f} times the "
        "baseline"
        for row, speed, ratio in zip(rows, speeds, ratios, strict=True)
    ]
    x_name = "tokens per second, one prompt at a time (log scale)"
    with _figure([row.name for row in rows], x_name, "score in %") as (figure, ax):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(LogFormatter())  # plain numbers: the default writes formulas, which are not parsed
        ax.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
        intervals = [
            Interval(speed, *(end * (speed / ratio.estimate) for end in ratio[1:]))
            for speed, ratio in zip(speeds, ratios, strict=True)
        ]
        _draw_scores(ax, rows, list(enumerate(intervals)))
        for row, speed in zip(rows, speeds, strict=True):
            place = speed, row.score.estimate
            ax.annotate(row.title, place, textcoords="offset points", xytext=(10, 8), fontsize=11)
        title = "Score in percent over tokens per second, one prompt at a time"
        return _save(figure, title, titles).decode()


def _draw_scores(ax: Axes, rows: Sequence[ReportRow], places: Sequence[tuple[int, Interval]]) -> None:
    """Draw the scores of rows with their intervals; end the vertical axis just beyond 0 and 100 percent.

    Args:
        ax: The axes.
        rows: The rows.
        places: A row's colour number and horizontal interval.
    """
    for index, (row, (number, x)) in enumerate(zip(rows, places, strict=True)):
        y, style = row.score, _style(number)
        ax.plot([x.low, x.high], [y.estimate, y.estimate], **_style(number, ""))
        ax.plot([x.estimate, x.estimate], [y.low, y.high], **_style(number, ""))
        inside = "white" if row.mismatches or row.has_other_prompts else style["color"]
        ax.plot(x.estimate, y.estimate, **style, markersize=9, markerfacecolor=inside, gid="marker")
        # A larger invisible target for the mouse.
        ax.plot(x.estimate, y.estimate, "o", markersize=26, alpha=0, gid=f"point-{index}", zorder=9, clip_on=False)
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, -2), min(high, 102))
    ax.set_yticks([tick for tick in ax.get_yticks() if max(low, 0) <= tick <= min(high, 100)])


def curves_plot(curves: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> str:
    """Plot curves as an SVG element.

    Args:
        curves: Points in line order, by curve name; not empty.
        x_name: What the horizontal axis shows, with its unit.
        y_name: What the vertical axis shows, with its unit.
    """
    titles: list[str] = []
    with _figure(list(curves), x_name, y_name) as (figure, ax):
        for number, (name, points) in enumerate(curves.items()):
            ax.plot(*zip(*points, strict=True), **_style(number, ""), linewidth=1.2)
            for x, y in points:
                ax.plot(x, y, **_style(number), gid=f"point-{len(titles)}")
                titles.append(f"{name}: {y_name} {y:.4g} at {x_name} {x:g}")
        return _save(figure, f"{y_name} over {x_name}", titles).decode()


def training_plots(tests: Sequence[ReportRow]) -> list[str]:
    """Plot the figures that the tested checkpoints' trainings logged, as SVG elements.

    A checkpoint's directory is inside its training's directory. Tests after the same training share a curve.
    """
    checkpoints = [test.results["config"].get("ckpt_path") for test in tests]
    directories = dict.fromkeys(Path(path).resolve().parent.parent for path in checkpoints if isinstance(path, str))
    files = {directory: directory / "metrics.csv" for directory in directories}
    names = {directory: f"{directory.parent.name}/{directory.name}" for directory in files}
    if len({*names.values()}) < len(names):  # equal names in different places
        names = {directory: str(directory) for directory in files}
    trainings = {names[directory]: _read_curves(path) for directory, path in files.items() if path.is_file()}
    plots = []
    for column, label in _TRAINING_COLUMNS.items():
        curves = {name: columns[column] for name, columns in trainings.items() if len(columns[column]) > 1}
        plots += [curves_plot(curves, "step", label)] if curves else []
    return plots


def _read_curves(path: Path) -> dict[str, Curve]:
    """Read all curves, without cells that are no finite numbers."""
    curves: dict[str, Curve] = {column: [] for column in _TRAINING_COLUMNS}
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        for row in csv.DictReader(lines):
            for column, curve in curves.items():
                try:
                    point = float(row.get("step") or "nan"), float(row.get(column) or "nan")
                except ValueError:
                    continue
                if all(map(math.isfinite, point)):
                    curve.append(point)
    return {column: _thin_out(curve) for column, curve in curves.items()}


def _thin_out(curve: Curve) -> Curve:
    size = -(-len(curve) // _MAX_POINTS)
    parts = [curve[start : start + size] for start in range(0, len(curve), max(size, 1))]
    return [(fmean(step for step, _ in part), fmean(value for _, value in part)) for part in parts]


def _describe_point(row: ReportRow) -> str:
    """Describe a point in a line."""
    score, tokens = f"{row.score.estimate:.1f} %", f"{row.tokens_per_forward.estimate:.2f} tokens per forward"
    if row.has_intervals:
        score += f" ({row.score.low:.1f} to {row.score.high:.1f})"
        tokens += f" ({row.tokens_per_forward.low:.2f} to {row.tokens_per_forward.high:.2f})"
    return f"{row.label}: score {score}, {tokens}, {row.prompts} prompts"


@contextmanager
def _figure(names: Sequence[str], x_name: str, y_name: str) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure with its named axes, under a legend with the names in colour order."""
    import matplotlib as mpl  # takes most of a second, so only where something is drawn
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = [_shorten_name(name) for name in names] if len(names) <= _MAX_LEGEND_ENTRIES else []
    num_columns = max(1, 122 // (8 + max(map(len, names), default=0)))  # in letters; line and gaps take eight
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's fonts draw the texts, not matplotlib's
        figure = Figure(figsize=(12.5, 6.1 + 0.28 * -(-len(names) // num_columns)), dpi=72, layout="constrained")
        ax = figure.add_subplot(xlabel=x_name, ylabel=y_name)
        handles = [Line2D([], [], **_style(number)) for number in range(len(names))]
        if names:
            legend = figure.legend(handles, map(str, range(len(names))), loc="outside upper left", ncols=num_columns)
            for text, name in zip(legend.get_texts(), names, strict=True):
                text.set_text(name)  # matplotlib leaves out a label that starts with _
        yield figure, ax


def _style(number: int, marker: str | None = None) -> dict[str, Any]:
    """Return a method's colour and marker by its number."""
    marker = _MARKERS[number % len(_MARKERS)] if marker is None else marker
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": marker, "clip_on": False}


def _save(figure: Figure, description: str, titles: Sequence[str], form: str = "svg") -> bytes:
    """Return a figure as file content; an SVG can also be put into a page.

    Args:
        figure: The figure.
        description: Description of the picture for readers who cannot see it.
        titles: Titles of the artists ``point-0``, ``point-1`` and so on.
        form: ``svg``, ``pdf`` or ``png``.
    """
    written = io.BytesIO()
    if form != "svg":
        figure.savefig(written, format=form, dpi=200, metadata={"CreationDate": None} if form == "pdf" else None)
        return written.getvalue()
    figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    for prefix, name in (("", "http://www.w3.org/2000/svg"), ("xlink", "http://www.w3.org/1999/xlink")):
        ElementTree.register_namespace(prefix, name)
    root = ElementTree.fromstring(written.getvalue())
    namespace = root.tag.removesuffix("svg")
    root.remove(root[0])  # matplotlib's style, which would hold for the whole page
    for element in root.iter(f"{namespace}g"):
        gid = element.attrib.pop("id", "")  # a page has several pictures, whose ids would be equal
        if gid.startswith("point-"):
            title = ElementTree.Element(f"{namespace}title")
            title.text = _make_printable(titles[int(gid.removeprefix("point-"))])
            element.insert(0, title)
            element.set("class", "point")
        elif gid == "marker":
            element.set("class", gid)
    width = root.get("viewBox", "").split()[2]
    for name in ("width", "height"):
        del root.attrib[name]
    root.attrib |= {"class": "plot", "role": "img", "aria-label": _make_printable(description)}
    root.set("style", f"max-width:100%;width:{width}px;height:auto")
    return ElementTree.tostring(root)


def _coordinates(row: ReportRow) -> tuple[float, float]:
    return row.tokens_per_forward.estimate, row.score.estimate


def _shorten_name(text: str) -> str:
    text = _make_printable(text)
    return text if len(text) <= _MAX_NAME_LENGTH else f"{text[: _MAX_NAME_LENGTH - 1]}…"


def _make_printable(text: str) -> str:
    """Replace control characters and lone surrogates, which XML has not, escaped or not."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
