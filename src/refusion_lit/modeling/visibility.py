"""Describes which keys the tokens in a batch see: as spans, as ranges or, for some kernels, as a matrix.

Ranges do not grow with the cache. A matrix [sequence, token, key] grows with the square of a prompt's length and rules
out fast attention kernels. It is built from ranges, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from refusion_lit.modeling.devices import to_device


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens in a sequence that share a context.

    Attributes:
        sequence: The sequence's index in the batch.
        offset: The first token's place in the sequence.
        length: Number of tokens.
        first_key: The first token's key; the other tokens' keys follow.
        context: Ranges ``(start, stop)`` of keys that all tokens see; may be empty, overlap and be unsorted.
        order: An order per token, which never falls: a token also sees the span's tokens with the same or a lower
            order. ``None``: causal.
    """

    sequence: int
    offset: int
    length: int
    first_key: int
    context: tuple[tuple[int, int], ...] = ()
    order: Sequence[int] | None = None

    def visible_stops(self) -> Int[np.ndarray, " token"]:
        """Return for every token how many tokens it sees, from the span's start."""
        if self.order is None:
            return np.arange(1, self.length + 1)
        orders = np.asarray(self.order)
        assert (np.diff(orders) >= 0).all(), "the order of a branch falls: feed tokens of a lower order first"
        return np.searchsorted(orders, orders, side="right")


@dataclass(frozen=True, slots=True)
class Visibility:
    """The keys that tokens in a padded batch see: cache entries or, without a cache, the sequence's tokens.

    Attributes:
        spans: Spans of all real tokens (no padding), sorted by sequence and offset. Every sequence has a span at offset
            0.
        shape: Number of sequences, and of tokens per sequence.
        num_keys: Number of keys per sequence.

    Examples:
        Two tokens after a cached prompt with three entries; they see the prompt and themselves, causally:

        >>> span = Span(sequence=0, offset=0, length=2, first_key=3, context=((0, 3),))
        >>> visible = as_mask(Visibility([span], shape=(1, 2), num_keys=5), torch.device("cpu"))
        >>> visible[0].int().tolist()
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """

    spans: Sequence[Span]
    shape: tuple[int, int]
    num_keys: int

    @property
    def is_causal(self) -> bool:
        """Whether every sequence sees its own tokens only, causally, and all sequences have the same first key."""
        first = self.spans[0].first_key
        return len(self.spans) == self.shape[0] and all(
            span.order is None and span.first_key == first and all(start >= stop for start, stop in span.context)
            for span in self.spans
        )

    @property
    def sees_all_keys(self) -> bool:
        """Whether every sequence is a single token whose key is the last, and the token sees all keys."""
        return all(
            span.length == 1 and span.first_key == self.num_keys - 1 and span.context == ((0, span.first_key),)
            for span in self.spans
        )

    def ranges(self, window: int | None = None) -> Int[Tensor, "sequence token range 2"]:
        """Return ranges of keys on the host. A token sees the union of its ranges; unused ranges are empty.

        Args:
            window: Number of tokens that a layer with a sliding window sees, the token itself included; keys must be in
                text order. In a span with an order, all tokens share the first token's window. ``None``: no window.
        """
        num_ranges = 1 + max(len(span.context) for span in self.spans)
        ranges = np.zeros((*self.shape, num_ranges, 2), dtype=np.int64)
        for span in self.spans:
            if span.offset == 0:
                ranges[span.sequence, :, 0] = span.first_key, span.first_key + 1  # what padding sees
            tokens = ranges[span.sequence, span.offset : span.offset + span.length]
            tokens[:, 0, 0] = span.first_key
            tokens[:, 0, 1] = span.first_key + span.visible_stops()
            tokens[:, 1 : 1 + len(span.context)] = np.reshape(span.context, (-1, 2))
            if window is not None:
                low = span.first_key - window + 1 + np.arange(span.length) * (span.order is None)
                tokens[:, :, 0] = np.maximum(tokens[:, :, 0], low[:, None])
        return torch.from_numpy(ranges)

    def cut(self, start: int, stop: int) -> Visibility:
        """Return what the tokens at some places see. Keys at the end that none of them sees are cut off.

        Args:
            start: First place.
            stop: Place after the last place.
        """
        spans: list[Span] = []
        for span in self.spans:
            low, high = max(start, span.offset) - span.offset, min(stop, span.offset + span.length) - span.offset
            if low >= high:
                continue
            if span.order is None:
                groups = [(low, high, low)]  # all tokens of the part see the tokens before it
            else:  # tokens with the same order see the same tokens of their span
                stops = span.visible_stops()
                borders = [low, *(low + 1 + np.flatnonzero(np.diff(stops[low:high]))).tolist(), high]
                groups = [(first, last, int(stops[first])) for first, last in pairwise(borders)]
            for first, last, num_seen in groups:
                context = (*span.context, (span.first_key, span.first_key + num_seen))
                place, key = span.offset + first - start, span.first_key + first
                spans.append(Span(span.sequence, place, last - first, key, context))
        present = {span.sequence for span in spans}
        keys = {span.sequence: span.first_key for span in reversed(self.spans)}
        spans += [Span(sequence, 0, 1, key) for sequence, key in keys.items() if sequence not in present]  # padding
        num_keys = max(max(span.first_key + span.length, *(high for _, high in span.context), 0) for span in spans)
        return Visibility(spans, (self.shape[0], stop - start), num_keys)


AttentionMask = Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"]
"""What tokens see: spans, a matrix (``True`` where a query sees a key), or ranges of keys whose union a token sees."""


def as_mask(
    attention: AttentionMask, device: torch.device, num_keys: int | None = None
) -> Bool[Tensor, "batch token key"]:
    """Return what tokens see as a matrix on a device; only ranges are copied to the device.

    Args:
        attention: What tokens see; a tensor must be on the device.
        device: The matrix's device.
        num_keys: Number of keys, for ranges without spans; by default the number of tokens.
    """
    if isinstance(attention, Visibility):
        num_keys = attention.num_keys
        attention = to_device(attention.ranges(), device)
    return attention if attention.ndim == 3 else ranges_mask(attention, num_keys or attention.shape[1])


def ranges_mask(ranges: Int[Tensor, "batch token range 2"], num_keys: int) -> Bool[Tensor, "batch token key"]:
    """Return the mask matrix of ranges; a token sees the union of its ranges ``(start, stop)`` of keys."""
    keys = torch.arange(num_keys, device=ranges.device)
    return ((keys >= ranges[..., 0, None]) & (keys < ranges[..., 1, None])).any(-2)
