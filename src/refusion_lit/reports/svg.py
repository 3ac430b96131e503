"""Elements of an SVG document; all texts and attributes are escaped."""

from __future__ import annotations

import unicodedata
from html import escape

STYLE = """
.plot { --paper: #fff; --ink: #1b2430; --soft: #5b6570; --line: #dfe3e8; --front: #8a929b;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #c05a92; --c4: #b97f00; --c5: #2b8cc4; --c6: #000; --c7: #8a6d00;
  font: 12px system-ui, "Segoe UI", Roboto, sans-serif; }
@media (prefers-color-scheme: dark) {
  .plot { --paper: #14171b; --ink: #e8eaed; --soft: #a3adb8; --line: #333b45; --front: #7d8894;
    --c0: #5aaee8; --c1: #f58f4c; --c2: #3ec79a; --c3: #e39cc5; --c4: #f5b83d; --c5: #9bd7fa; --c6: #fff;
    --c7: #c9a93a; }
}
.plot text { fill: var(--ink); }
.plot .label { fill: var(--soft); stroke: var(--paper); stroke-width: 3; paint-order: stroke; pointer-events: none; }
.plot .partial { opacity: .5; }
.plot .soft { fill: var(--soft); }
.plot .paper { fill: var(--paper); }
.plot .grid { stroke: var(--line); }
.plot .axis { stroke: var(--soft); }
.plot .front { stroke: var(--front); stroke-width: 7; stroke-opacity: .35; fill: none; stroke-linejoin: round; }
.plot .missing { fill: none; stroke: var(--line); stroke-dasharray: 3 3; }
.plot .target { fill: transparent; }
.plot .point:hover .target { fill: var(--ink); fill-opacity: .14; }
"""
"""Style of all plots, for light and dark pages."""

CHARACTER_WIDTH = 6.6
"""Mean width of a character of the plots' font; browsers differ, so leave some room."""


def element(name: str, *content: str, text: str | None = None, **attributes: object) -> str:
    """Return an element as text.

    Args:
        name: The element's name.
        content: Elements inside it, already written.
        text: A text inside it, which is escaped.
        attributes: Attributes; ``_`` stands for ``-``, and ``class_`` for ``class``. Floats are rounded to 0.01.
    """
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"' for key, value in attributes.items())
    inner = "".join(content) + ("" if text is None else _escaped(text))
    return f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>"


def document(width: float, height: float, title: str, *content: str) -> str:
    """Return an SVG element to put into a page; see :func:`standalone` for a file.

    Args:
        width: Width in pixels, which is also the maximum; the picture shrinks with its page.
        height: Height in pixels.
        title: What the picture shows, for readers that do not see it.
        content: Elements.
    """
    box = f"0 0 {width:g} {height:g}"
    style = f"max-width:100%;width:{width:g}px;height:auto"
    return element("svg", *content, xmlns="http://www.w3.org/2000/svg", viewBox=box, class_="plot", style=style,
                   role="img", aria_label=title)  # fmt: skip


def standalone(picture: str) -> str:
    """Return a picture with its style and background, as the content of a file."""
    start = picture.index(">") + 1
    style = f'<style>{STYLE}</style><rect class="paper" width="100%" height="100%"/>'
    return f"{picture[:start]}{style}{picture[start:]}\n"


def shortened(text: str, max_length: int) -> str:
    """Return a text of at most this many characters."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _escaped(value: object) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    # XML has no control characters and no lone surrogates, escaped or not.
    return escape("".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text))
