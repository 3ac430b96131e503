"""Names the nearest right word for a misspelt one, or lists what exists."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ``; did you mean ...?`` or, with nothing near, ``; known are ...``.

    Args:
        word: What was given.
        known: What exists.
    """
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(known))}" if known else ""
