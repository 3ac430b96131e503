"""Makes model text safe to display: it cannot control a terminal or be invisible on a page."""

from __future__ import annotations

import unicodedata

_SYMBOLS = {"\n": "↵", "\t": "→", "\x7f": "␡"}
# Control and format characters (which include text direction), lone surrogates, line and paragraph separators.
_REPLACED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str) -> str:
    """Replace every control character by one visible character."""
    return "".join(_visible(character) for character in text)


def visible_lines(text: str) -> str:
    """Replace every control character except newlines by one visible character."""
    return "\n".join(map(visible, text.split("\n")))


def _visible(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # the block "Control Pictures"
    replaced = unicodedata.category(character) in _REPLACED_CATEGORIES
    return "\N{REPLACEMENT CHARACTER}" if replaced else character
