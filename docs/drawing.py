"""Tokens in rows and lines of text, as SVG: what the pictures of the documentation are made of."""

from __future__ import annotations

import textwrap
from pathlib import Path

CELL = 34
COLOURS = {"prompt": "#dfe3ea", "known": "#9fd3c7", "mask": "#ffffff", "draft": "#ffe08a", "rejected": "#f3a6a0"}
TARGET = Path(__file__).parent / "img"


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def cell(x: float, y: float, label: str, kind: str) -> str:
    """Return one token: its text, and below it its position."""
    name, _, position = label.partition("@")
    dashes = ' stroke-dasharray="3 2"' if kind == "mask" else ""
    box = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{COLOURS[kind]}" stroke="#555"{dashes}/>'
    middle = x + CELL / 2
    return box + text(middle, y + 16, name, 13, "middle") + text(middle, y + 29, position, 9, "middle")


def row(y: float, caption: str, groups: list[tuple[str, list[str]]]) -> str:
    """Return a caption and groups of tokens, from left to right in sequence order."""
    parts, x = [text(8, y + 21, caption)], 250.0
    for kind, labels in groups:
        for label in labels:
            parts.append(cell(x, y, label, kind))
            x += CELL
        x += 8
    return "".join(parts)


def draw_steps(
    name: str, title: str, steps: list[tuple[str, list[tuple[str, list[str]]]]], note: str, *, width: int = 700
) -> None:
    """Draw captions with groups of tokens, one below another, and a note below them; write the picture to its file."""
    parts = [row(10 + 52 * i, caption, groups) for i, (caption, groups) in enumerate(steps)]
    end = 10 + 52 * len(steps)
    lines = textwrap.wrap(note, (width - 30) // 6)  # a character is about 6 wide
    parts += [text(8, end + 4 + 16 * i, line, 12) for i, line in enumerate(lines)]
    picture(name, width, end + 16 * len(lines), title, parts)


def picture(name: str, width: int, height: int, title: str, parts: list[str]) -> None:
    """Write a picture to its file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        f'font-family="system-ui, sans-serif"><rect width="{width}" height="{height}" fill="#fbfbfb"/>'
    )
    (TARGET / name).write_text(head + "".join(parts) + "</svg>\n", encoding="utf-8")
