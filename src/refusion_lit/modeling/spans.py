"""Spans: tokens of a sequence that see the same keys, and these keys as intervals or ranges.

The size of ranges does not grow with the cache; a matrix [sequence, token, key] grows with the square of a prompt and
rules out the fast attention kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a sequence that share a context.

    Attributes:
        sequence: Their sequence of the batch.
        offset: Place of the first one in it.
        length: Number of tokens.
        first_key: Key of the first one; the keys of the others follow.
        context: Ranges ``(start, stop)`` of keys that all of them see; may be empty, overlap and be unsorted.
        order: A token also sees the span's tokens of the same or a lower order. It never falls. ``None``: causal.
    """

    sequence: int
    offset: int
    length: int
    first_key: int
    context: tuple[tuple[int, int], ...] = ()
    order: Sequence[int] | None = None

    def interval(self) -> tuple[int, range | Int[np.ndarray, " token"]] | None:
        """Return the interval of keys that each token sees, as a common start and a stop for each token.

        Returns:
            ``None`` if the keys of some token are not a single interval from the common start. The stops are a
            ``range`` if each token sees one key more than the token before it.
        """
        first = self.first_key
        if self.order is None and len(self.context) < 2:  # most spans, without any array
            start, stop = self.context[0] if self.context else (first, first)
            if start >= stop or (stop == first and start < first):
                return min(start, first) if start < stop else first, range(first + 1, first + self.length + 1)
        own_stops = _own_stops(self.order, self.length)
        common = _merged([*self.context, (self.first_key, self.first_key + int(own_stops[0]))])
        if len(common) > 1:
            return None
        [(start, stop)] = common
        return start, np.maximum(own_stops + self.first_key, stop)

    def ranges(self) -> Int[np.ndarray, "token range 2"]:
        """Return ranges of keys; each token sees the union of its ranges, and unused ranges are empty."""
        interval = self.interval()
        if interval is not None:
            start, stops = interval
            return np.stack([np.full(self.length, start), stops], -1)[:, None]
        context = np.array(_merged(self.context), dtype=np.int64).reshape(-1, 2)
        shared = np.broadcast_to(context, (self.length, *context.shape))
        own_stops = _own_stops(self.order, self.length)
        own = np.stack([np.zeros_like(own_stops), own_stops], -1)[:, None] + self.first_key
        return np.concatenate([shared, own], 1)


def spans_ranges(spans: Sequence[Span], shape: tuple[int, int]) -> Int[Tensor, "sequence token range 2"]:
    """Return ranges of keys on the host; each token sees the union of its ranges, and unused ranges are empty.

    Args:
        spans: Spans of all tokens but padding, by sequence and offset. Every sequence has a span at offset 0.
        shape: Number of sequences, and of tokens in each sequence.
    """
    found = [span.ranges() for span in spans]
    ranges = np.zeros((*shape, max(own.shape[1] for own in found), 2), dtype=np.int64)
    for span, own in zip(spans, found, strict=True):
        if span.offset == 0:
            ranges[span.sequence, :, 0] = span.first_key, span.first_key + 1  # what padding sees
        place = ranges[span.sequence, span.offset : span.offset + span.length]
        place[:] = 0
        place[:, : own.shape[1]] = own
    return torch.from_numpy(ranges)


def ranges_mask(ranges: Int[Tensor, "batch token range 2"], num_keys: int) -> Bool[Tensor, "batch token key"]:
    """Return the mask matrix of ranges; each token sees the union of its ranges ``(start, stop)`` of keys."""
    keys = torch.arange(num_keys, device=ranges.device)
    return ((keys >= ranges[..., 0, None]) & (keys < ranges[..., 1, None])).any(-2)


def _own_stops(order: Sequence[int] | None, length: int) -> Int[np.ndarray, " token"]:
    """Return how many of a span's first tokens each of them sees."""
    if order is None:
        return np.arange(1, length + 1)
    orders = np.asarray(order)
    assert (np.diff(orders) >= 0).all(), "the order of a branch falls: feed tokens of a lower order first"
    return np.searchsorted(orders, orders, side="right")


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint ranges in ascending order that do not touch, without empty ones."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((start, stop) for start, stop in ranges if start < stop):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
