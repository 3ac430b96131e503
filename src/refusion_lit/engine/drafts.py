"""Drafts of one branch: one read, or two if some of its offsets are in holes, where no end of sequence is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import TypeVar

from refusion_lit.engine.reading import Read
from refusion_lit.engine.requests import Branch, Draw, Reading

T = TypeVar("T")


class Drafts:
    """Tokens drafted at offsets of a branch.

    Args:
        branch: The branch.
        draw: How tokens are drawn.
        offsets: Offsets into the branch.
        holes_end: Position after the last given token; positions before it are in holes or given. 0 without holes.
        ends: Ids that are not drawn in holes.
        prompt_id: Id of the prompt, which keys the noise.
        start: Index of the branch's first hidden state.
        length: Hidden states a row.

    Attributes:
        reads: The reads that draft them: a single one, or one for the holes and one for the other offsets.
        reading: Receives the drafts in the order of ``offsets``; complete after :meth:`merge`.
    """

    def __init__(
        self, branch: Branch, draw: Draw, offsets: Sequence[int], *, holes_end: int, ends: Sequence[int],
        prompt_id: str, start: int, length: int,
    ) -> None:  # fmt: skip
        where = {"prompt_id": prompt_id, "start": start, "length": length}
        self._in_hole = [branch.positions[offset] + branch.shift < holes_end for offset in offsets] if holes_end else []
        if any(self._in_hole):
            no_end = replace(draw, forbidden=tuple(sorted({*draw.forbidden, *ends})))
            inside, outside = ([*compress(offsets, (hole is kind for hole in self._in_hole))] for kind in (True, False))
            parts = [(no_end, inside), (draw, outside)] if outside else [(no_end, offsets)]
        else:
            parts = [(draw, offsets)]
        self.reads = [Read.drafts(branch, how, at, **where) for how, at in parts]
        self.reading = self.reads[0].reading if len(parts) == 1 else Reading()

    def merge(self) -> None:
        """Merge the drafts of two reads in the order of the offsets; does nothing for a single read."""
        if len(self.reads) == 1:
            return
        inside, outside = (read.reading for read in self.reads)
        self.reading.tokens = self._merged(inside.tokens, outside.tokens)
        if inside.probabilities:
            self.reading.probabilities = self._merged(inside.probabilities, outside.probabilities)
        for name, values in inside.statistics.items():
            self.reading.statistics[name] = self._merged(values, outside.statistics[name])

    def _merged(self, inside: Sequence[T], outside: Sequence[T]) -> list[T]:
        parts = {True: iter(inside), False: iter(outside)}
        return [next(parts[hole]) for hole in self._in_hole]
