"""Visibility: which keys each token of a batch sees, as ranges, whose size does not grow with the cache.

A matrix [sequence, token, key] grows with the square of a prompt and rules out the fast attention kernels. It is built
only for attention implementations that need one. For accelerators it is built on the device from ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.modeling.transfer import to_device

_TRIANGLE = np.tri(128, dtype=bool)
"""Causal matrices of short spans are views of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a sequence that share a context.

    Attributes:
        sequence: Their sequence of the batch.
        offset: Place of the first one in it.
        length: Number of tokens.
        first_key: Key of the first one; the keys of the others follow.
        context: Ranges ``(start, stop)`` of keys that all of them see; may be empty, overlap and be unsorted.
        order: A token also sees the span's tokens of the same or a lower order. ``None``: causal.
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
            ``None`` if the keys of some token are not a single interval from the common start, or fewer than those of
            the token before it. The stops are a ``range`` if each token sees one key more than the token before it.
        """
        first = self.first_key
        if self.order is None and len(self.context) < 2:  # most spans, without any array
            start, stop = self.context[0] if self.context else (first, first)
            if start >= stop or (stop == first and start < first):
                return min(start, first) if start < stop else first, range(first + 1, first + self.length + 1)
        own_stops = _own_stops(self.order, self.length)
        if own_stops is None:
            return None
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
        return np.concatenate([shared, _runs(self.order, self.length) + self.first_key], 1)


@dataclass(frozen=True, slots=True)
class Visibility:
    """Keys that the tokens of a padded batch see: cache entries or, without a cache, tokens of the sequence.

    Attributes:
        spans: Spans of all tokens but padding, by sequence and offset. Every sequence has a span at offset 0.
        shape: Number of sequences, and of tokens in each sequence.
        num_keys: Number of keys of each sequence.
    """

    spans: Sequence[Span]
    shape: tuple[int, int]
    num_keys: int

    @property
    def is_causal(self) -> bool:
        """Whether every sequence is one span that sees itself, causally, and nothing else."""
        return len(self.spans) == self.shape[0] and all(
            span.order is None and all(start >= stop for start, stop in span.context) for span in self.spans
        )

    @property
    def is_full(self) -> bool:
        """Whether every sequence is one token after all other keys, and sees them all."""
        return all(
            span.length == 1 and span.first_key == self.num_keys - 1 and span.context == ((0, span.first_key),)
            for span in self.spans
        )

    def mask(self) -> Bool[Tensor, "sequence token key"]:
        """Return the matrix on the host. Padding sees the first key of its sequence: a query without keys gives NaN."""
        return self.additive_mask() == 0

    def additive_mask(self) -> Float[Tensor, "sequence token key"]:
        """Return the additive form of the matrix in float32: 0 where it is true, -inf where it is false."""
        matrix = np.full((*self.shape, self.num_keys), -np.inf, np.float32)
        is_padded = self._num_tokens < self.shape[0] * self.shape[1]
        if is_padded:
            for sequence, first in self._padding_keys.items():
                matrix[sequence, :, first] = 0
        for span in self.spans:
            tokens = matrix[span.sequence, span.offset : span.offset + span.length]
            if is_padded:
                tokens[:] = -np.inf
            for start, stop in span.context:
                tokens[:, start:stop] = 0
            own = tokens[:, span.first_key : span.first_key + span.length]
            np.copyto(own, 0, where=_own_mask(span.order, span.length))
        return torch.from_numpy(matrix)

    def ranges(self) -> Int[Tensor, "sequence token range 2"]:
        """Return ranges of keys on the host; each token sees the union of its ranges, and unused ranges are empty."""
        found = [span.ranges() for span in self.spans]
        num_ranges = max(ranges.shape[1] for ranges in found)
        ranges = np.zeros((*self.shape, num_ranges, 2), dtype=np.int64)
        for sequence, first in self._padding_keys.items():
            ranges[sequence, :, 0] = first, first + 1
        for span, own in zip(self.spans, found, strict=True):
            place = ranges[span.sequence, span.offset : span.offset + span.length]
            place[:] = 0
            place[:, : own.shape[1]] = own
        return torch.from_numpy(ranges)

    @property
    def _num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def _padding_keys(self) -> dict[int, int]:
        return {span.sequence: span.first_key for span in self.spans if span.offset == 0}


def ranges_mask(ranges: Int[Tensor, "batch token range 2"], num_keys: int) -> Bool[Tensor, "batch token key"]:
    """Return the mask matrix of ranges; each token sees the union of its ranges ``(start, stop)`` of keys."""
    keys = torch.arange(num_keys, device=ranges.device)
    return ((keys >= ranges[..., 0, None]) & (keys < ranges[..., 1, None])).any(-2)


AttentionMask = Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"]
"""What each token sees: spans, a matrix (``True`` where a query sees a key), or ranges of keys whose union it sees."""


def as_mask(
    attention: AttentionMask, device: torch.device, num_keys: int | None = None
) -> Bool[Tensor, "batch token key"]:
    """Return what tokens see as a matrix on a device; only ranges are copied to the device.

    Args:
        attention: What each token sees; a tensor is on the device already.
        device: Where the matrix is wanted.
        num_keys: Number of keys, for ranges without spans; by default the number of tokens.
    """
    if isinstance(attention, Visibility):
        if device.type == "cpu":
            return attention.mask()
        return ranges_mask(to_device(attention.ranges(), device), attention.num_keys)
    return attention if attention.ndim == 3 else ranges_mask(attention, num_keys or attention.shape[1])


def _own_stops(order: Sequence[int] | None, length: int) -> Int[np.ndarray, " token"] | None:
    """Return how many of a span's tokens each of them sees; ``None`` if these are not its first ones for all."""
    if order is None:
        return np.arange(1, length + 1)
    orders = np.asarray(order)
    if (np.diff(orders) < 0).any():
        return None
    return np.searchsorted(orders, orders, side="right")


def _own_mask(order: Sequence[int] | None, length: int) -> Bool[np.ndarray, "token token"]:
    if order is None:
        return _TRIANGLE[:length, :length] if length <= len(_TRIANGLE) else np.tri(length, dtype=bool)
    orders = np.asarray(order)
    return orders[None, :] <= orders[:, None]


def _runs(order: Sequence[int] | None, length: int) -> Int[np.ndarray, "token range 2"]:
    """Return the runs of a span's tokens that each of them sees; unused ones are empty."""
    stops = _own_stops(order, length)
    if stops is not None:
        return np.stack([np.zeros(length, dtype=np.int64), stops], -1)[:, None]
    edges = np.diff(np.pad(_own_mask(order, length).astype(np.int8), ((0, 0), (1, 1))), axis=1)
    runs = np.zeros((length, int((edges > 0).sum(1).max()), 2), dtype=np.int64)
    for token, row in enumerate(edges):
        starts = (row > 0).nonzero()[0]
        ends = (row < 0).nonzero()[0]
        runs[token, : len(starts)] = np.stack([starts, ends], -1)
    return runs


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint ranges in ascending order that do not touch, without empty ones."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((start, stop) for start, stop in ranges if start < stop):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
