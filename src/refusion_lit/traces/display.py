"""Model text made fit to be shown: nothing in it can steer a terminal or hide on a page."""

from __future__ import annotations

import unicodedata

_SHOWN = {"\n": "↵", "\t": "→", "\x7f": "␡"}


def visible(text: str) -> str:
    """Return text without control characters: pictures of them instead, one character each."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    # Control (Cc), direction and other format characters (Cf), half surrogate pairs (Cs), line separators (Zl, Zp).
    return (
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") else character
    )


def visible_lines(text: str) -> str:
    """Return text without control characters but line ends."""
    return "\n".join(map(visible, text.split("\n")))
