"""Natural order of names: numbers inside them count by value, so ``test-2`` comes before ``test-10``."""

from __future__ import annotations

import re


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which runs of digits compare by value and everything else as text."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    # Lengths compare numbers of any size: converting long ones to integers raises an error.
    return tuple((0, len(p.lstrip("0")), p.lstrip("0")) if "0" <= p[0] <= "9" else (1, 0, p) for p in parts)
