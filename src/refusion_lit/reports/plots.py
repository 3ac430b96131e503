"""Plots as SVG: every point and cell has a title that says what it is, shown while the mouse is over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refusion_lit.reports import axes
from refusion_lit.reports.comparison import Comparison, Grid, MeasuredRow
from refusion_lit.reports.intervals import Interval
from refusion_lit.reports.svg import CHARACTER_WIDTH, document, element, shortened

_MAX_LEGEND_ENTRIES = 24
_MAX_LABEL_LENGTH = 28

# Viridis at five places: its lightness grows steadily, which every kind of colour blindness keeps.
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_CELL_WIDTH, _CELL_HEIGHT = 88.0, 34.0


def tradeoff_plot(comparison: Comparison) -> str:
    """Plot score over tokens per forward, with intervals and the Pareto front, as an SVG element."""
    methods: dict[str, list[MeasuredRow]] = {}
    for m in comparison.measured:
        methods.setdefault(m.row.method, []).append(m)
    styles = {method: number for number, method in enumerate(methods)}
    names = {method: any(m.row.mismatches for m in rows) for method, rows in methods.items()}
    legend, top = axes.legend(names) if len(methods) <= _MAX_LEGEND_ENTRIES else ("", axes.TOP)
    x = _scale([m.tokens_per_forward for m in comparison.measured], axes.LEFT, axes.WIDTH - axes.RIGHT)
    y = _scale([m.score for m in comparison.measured], top + axes.HEIGHT, top, maximum=100.0)
    places = {id(m): (x(m.tokens_per_forward.estimate), y(m.score.estimate)) for m in comparison.measured}
    front = sorted(places[id(m)] for m in comparison.measured if m.on_front)
    parts = [legend, axes.axes(x, y, "tokens per forward (more is faster)", "score in %", maximum=100)]
    if len(comparison.measured) > 1:
        parts.append(axes.line(front, class_="front"))
        parts += [element("circle", cx=a, cy=b, r=11, class_="front", stroke_width=3) for a, b in front]
    for method, rows in methods.items():
        if len(rows) > 1 and not comparison.grids:  # points of a grid over two options do not form a curve
            points = [places[id(m)] for m in sorted(rows, key=lambda m: m.tokens_per_forward.estimate)]
            parts.append(axes.line(points, fill="none", stroke=axes.colour(styles[method]), stroke_opacity="0.6"))
    parts += [_point(m, x, y, styles[m.row.method], comparison) for m in comparison.measured]
    parts.append(_labels(comparison, places, (axes.LEFT, top, axes.WIDTH - axes.RIGHT, top + axes.HEIGHT)))
    title = f"Score in percent over tokens per forward of {len(comparison.measured)} rows; see the table for the values"
    return document(axes.WIDTH, top + axes.HEIGHT + axes.BOTTOM, title, *parts)


def curves_plot(curves: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> str:
    """Plot one figure over another, a line for each name, as an SVG element.

    Args:
        curves: Points in the order of the line, by name; at least one point.
        x_name: What the horizontal axis shows, with its unit.
        y_name: What the vertical axis shows, with its unit.
    """
    legend, top = axes.legend(dict.fromkeys(curves, False))
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    x = axes.scale(min(xs), max(xs), axes.LEFT, axes.WIDTH - axes.RIGHT)
    y = axes.scale(min(ys), max(ys), top + axes.HEIGHT, top)
    parts = [legend, axes.axes(x, y, x_name, y_name)]
    for number, (name, points) in enumerate(curves.items()):
        places = [(x(a), y(b)) for a, b in points]
        parts.append(axes.line(places, fill="none", stroke=axes.colour(number)))
        for (a, b), place in zip(points, places, strict=True):
            title = element("title", text=f"{name}: {y_name} {b:.4g} at {x_name} {a:g}")
            parts.append(element("g", title, axes.marker(number, *place), class_="point"))
    return document(axes.WIDTH, top + axes.HEIGHT + axes.BOTTOM, f"{y_name} over {x_name}", *parts)


def heat_map(grid: Grid) -> str:
    """Plot one figure over two options as an SVG element, with its value in every cell."""
    form: Callable[[float], str] = "{:.1f} %".format if grid.figure == "score" else "{:.2f}".format
    x_name, y_name = (name.rsplit(".", 1)[-1] for name in (grid.x_name, grid.y_name))
    title = f"{grid.method}: {'score' if grid.figure == 'score' else 'tokens per forward'}"
    left = 34.0 + CHARACTER_WIDTH * max(len(shortened(value, _MAX_LABEL_LENGTH)) for value in grid.y_values)
    width = left + max(_CELL_WIDTH * len(grid.x_values), CHARACTER_WIDTH * 40) + 12
    bottom = 34 + _CELL_HEIGHT * len(grid.y_values)
    known = [value for row in grid.values for value in row if value is not None]
    parts = [element("text", text=shortened(title, int((width - 16) / CHARACTER_WIDTH)), x=8, y=18, font_weight=600)]
    for row, y_value in enumerate(grid.y_values):
        y = 30 + _CELL_HEIGHT * row
        label = shortened(y_value, _MAX_LABEL_LENGTH)
        parts.append(element("text", text=label, x=left - 8, y=y + 21, text_anchor="end"))
        for column, x_value in enumerate(grid.x_values):
            value, x = grid.values[row][column], left + _CELL_WIDTH * column
            shown = "no point" if value is None else form(value)
            fraction = (
                0.0 if value is None or max(known) == min(known) else (value - min(known)) / (max(known) - min(known))
            )
            parts.append(
                _cell(f"{y_name} {y_value}, {x_name} {x_value}: {shown}", x, y, shown, fraction, value is None)
            )
    for column, x_value in enumerate(grid.x_values):
        label = shortened(x_value, int(_CELL_WIDTH / CHARACTER_WIDTH))
        middle = left + _CELL_WIDTH * (column + 0.5)
        parts.append(element("text", text=label, x=middle, y=bottom + 14, text_anchor="middle"))
    middle = left + _CELL_WIDTH * len(grid.x_values) / 2
    parts.append(element("text", text=x_name, x=middle, y=bottom + 34, text_anchor="middle", class_="soft"))
    turned = f"translate(14 {(30 + bottom) / 2:g}) rotate(-90)"
    parts.append(element("text", text=y_name, transform=turned, text_anchor="middle", class_="soft"))
    return document(width, bottom + 44, f"{title} over {y_name} and {x_name}", *parts)


def describe(measured: MeasuredRow, option_names: dict[str, str]) -> str:
    """Return what a point is, in one line."""
    options = ", ".join(f"{option_names[name]} {value}" for name, value in measured.row.options.items())
    name = f"{measured.row.name} ({options})" if options else measured.row.name
    score, speed = measured.score, measured.tokens_per_forward
    ranges = [f" ({v.low:.1f} to {v.high:.1f})" if measured.has_intervals else "" for v in (score, speed)]
    figures = f"score {score.estimate:.1f} %{ranges[0]}, {speed.estimate:.2f} tokens per forward{ranges[1]}"
    note = (
        f", {measured.num_prompts} of {measured.num_expected} prompts"
        if measured.num_prompts < measured.num_expected
        else ""
    )
    return f"{name}: {figures}{note}"


def _scale(values: Sequence[Interval], start: float, end: float, maximum: float = math.inf) -> axes.Scale:
    return axes.scale(min(v.low for v in values), max(v.high for v in values), start, end, maximum)


def _point(m: MeasuredRow, x: axes.Scale, y: axes.Scale, number: int, comparison: Comparison) -> str:
    speed, score = m.tokens_per_forward, m.score
    place = x(speed.estimate), y(score.estimate)
    bars = [
        element("path", d=d, fill="none", stroke=axes.colour(number), stroke_opacity=0.6)
        for d in (
            f"M{x(speed.low):.2f} {place[1]:.2f}H{x(speed.high):.2f}",
            f"M{place[0]:.2f} {y(score.low):.2f}V{y(score.high):.2f}",
        )
    ]
    target = element("circle", cx=place[0], cy=place[1], r=13, class_="target")
    title = element("title", text=describe(m, comparison.option_names))
    marker = axes.marker(number, *place, is_hollow=bool(m.row.mismatches))
    return element("g", title, *bars, marker, target, class_="point partial" if m.is_partial else "point")


def _labels(
    comparison: Comparison, places: dict[int, tuple[float, float]], frame: tuple[float, float, float, float]
) -> str:
    """Return a label beside each point that has room for it: its options, else its name."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in places.values()]
    parts = []
    for m in sorted(comparison.measured, key=lambda m: not m.on_front):
        text = shortened(", ".join(m.row.options.values()) or m.row.name, _MAX_LABEL_LENGTH)
        x, y = places[id(m)]
        half, width = CHARACTER_WIDTH * len(text) / 2, CHARACTER_WIDTH * len(text)
        for centre, base in ((x + 12 + half, y + 4), (x - 12 - half, y + 4), (x, y - 13), (x, y + 23)):
            box = (centre - half, base - 11, centre - half + width, base + 3)
            inside = box[0] > frame[0] and box[1] > frame[1] and box[2] < frame[2] and box[3] < frame[3]
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                parts.append(element("text", text=text, x=centre, y=base, text_anchor="middle", class_="label"))
                break
    return element("g", *parts)


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _cell(title: str, x: float, y: float, text: str, fraction: float, is_missing: bool) -> str:
    at = fraction * (len(_RAMP) - 1)
    below = min(int(at), len(_RAMP) - 2)
    rgb = [round(a + (b - a) * (at - below)) for a, b in zip(_RAMP[below], _RAMP[below + 1], strict=True)]
    box: dict[str, Any] = {"x": x + 1, "y": y + 1, "width": _CELL_WIDTH - 2, "height": _CELL_HEIGHT - 2, "rx": 3}
    middle: dict[str, Any] = {"x": x + _CELL_WIDTH / 2, "y": y + 21, "text_anchor": "middle"}
    if is_missing:
        parts = [element("rect", **box, class_="missing"), element("text", text="\N{EN DASH}", **middle, class_="soft")]
    else:
        colour = "#fff" if fraction < 0.43 else "#000"  # at least 4.5 : 1
        fill = f"rgb({','.join(map(str, rgb))})"
        parts = [element("rect", **box, fill=fill), element("text", text=text, **middle, style=f"fill:{colour}")]
    return element("g", element("title", text=title), *parts, class_="point")
