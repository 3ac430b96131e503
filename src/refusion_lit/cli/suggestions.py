"""Suggests the right word for a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the known name next to a word, or nothing if none is near.

    Names are compared whole and by their last part (``precision`` is near ``trainer.precision``), without regard to
    case and dashes. A name is near if one edit leads to it, two from 12 characters on; an edit inserts, deletes or
    replaces a character or swaps two neighbours.

    Args:
        word: What was given.
        known: Names that exist.
    """
    word = _plain(word)
    last = word.rpartition(".")[2]
    found: list[tuple[int, int, str]] = []
    for name in known:
        plain = _plain(name)
        pairs = [(word, plain), (last, plain.rpartition(".")[2])]
        for rank, (given, right) in enumerate(pairs):
            edits = edit_distance(given, right)
            if edits <= (2 if len(given) >= 12 else min(1, len(given) - 1)):
                found.append((edits, rank, name))
    return f"; did you mean {min(found)[2]!r}?" if found else ""


def edit_distance(first: str, second: str) -> int:
    """Return the number of edits between two words; swapping two neighbouring characters is one edit."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, character in enumerate(first, start=1):
        before, above, row = row, before, [i]
        for j, other in enumerate(second, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (character != other))
            if i > 1 and j > 1 and character == second[j - 2] and first[i - 2] == other:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
