"""Axes, legend, markers and lines of plots, as SVG elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refusion_lit.reports.svg import CHARACTER_WIDTH, element, shortened

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900.0, 400.0, 62.0, 24.0, 14.0, 50.0
"""Size of a plot's frame and its margins, in pixels."""

# Shapes around (0, 0): methods differ without colour, too. The colours are Okabe and Ito's, for colour-blind readers.
_SHAPES = (
    "M5 0A5 5 0 1 1 -5 0A5 5 0 1 1 5 0Z", "M-4.5 -4.5H4.5V4.5H-4.5Z", "M0 -6L5.5 4.5H-5.5Z", "M0 -6L6 0L0 6L-6 0Z",
    "M0 6L5.5 -4.5H-5.5Z", "M-2 -6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z", "M-5 -5H5L-5 5H5Z",
    "M0 -6L6 -1L4 5H-4L-6 -1Z",
)  # fmt: skip
_NUM_COLOURS = 8
_MAX_NAME_LENGTH = 60


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return a value's pixel."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return some five to ten round values inside the range."""
        rough = (self.high - self.low) / 7
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def scale(low: float, high: float, start: float, end: float, maximum: float = math.inf) -> Scale:
    """Return a scale with a margin at both ends that does not cross 0, and crosses the maximum only slightly."""
    margin = 0.06 * (high - low) or 0.1 * high or 1.0
    return Scale(max(low - margin, 0.0 if low > 0 else -margin), min(high + margin, maximum + 0.4 * margin), start, end)


def axes(x: Scale, y: Scale, x_name: str, y_name: str, *, maximum: float = math.inf) -> str:
    """Return both axes with names, ticks and grid lines; none above ``maximum`` on the vertical one."""
    parts = []
    for value in y.ticks():
        if value <= maximum:
            parts.append(element("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="grid"))
            parts.append(element("text", text=f"{value:g}", x=x.start - 8, y=y(value) + 4, text_anchor="end"))
    for value in x.ticks():
        parts.append(element("line", x1=x(value), x2=x(value), y1=y.start, y2=y.end, class_="grid"))
        parts.append(element("text", text=f"{value:g}", x=x(value), y=y.start + 18, text_anchor="middle"))
    parts.append(element("path", d=f"M{x.start:g} {y.end:g}V{y.start:g}H{x.end:g}", fill="none", class_="axis"))
    middle = (x.start + x.end) / 2
    parts.append(element("text", text=x_name, x=middle, y=y.start + 40, text_anchor="middle", class_="soft"))
    turned = f"translate(16 {(y.start + y.end) / 2:g}) rotate(-90)"
    parts.append(element("text", text=y_name, transform=turned, text_anchor="middle", class_="soft"))
    return element("g", *parts)


def legend(names: Mapping[str, bool]) -> tuple[str, float]:
    """Return the legend above a plot, in as many lines as it needs, and where the plot starts below it.

    Args:
        names: The names in the order of their colours, and whether each one is marked.
    """
    parts, x, y = [], LEFT, 16.0
    for number, (full, is_marked) in enumerate(names.items()):
        name = shortened(full, _MAX_NAME_LENGTH) + (" *" if is_marked else "")
        width = 34 + CHARACTER_WIDTH * len(name)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = LEFT, y + 20
        parts += [marker(number, x + 6, y - 4, is_hollow=is_marked), element("text", text=name, x=x + 18, y=y)]
        x += width
    return element("g", *parts), y + 16


def marker(number: int, x: float, y: float, *, is_hollow: bool = False) -> str:
    """Return a marker; number chooses shape and colour."""
    own = colour(number)
    return element("path", d=_SHAPES[number % len(_SHAPES)], transform=f"translate({x:.2f} {y:.2f})", stroke=own,
                   stroke_width=1.5, fill="var(--paper)" if is_hollow else own)  # fmt: skip


def line(points: Sequence[tuple[float, float]], **attributes: str) -> str:
    """Return a line through points given in pixels."""
    return element("polyline", points=" ".join(f"{x:.2f},{y:.2f}" for x, y in points), **attributes)


def colour(number: int) -> str:
    """Return a colour of the plots' style."""
    return f"var(--c{number % _NUM_COLOURS})"
