"""Attention in several calls on CPUs, each of the smallest possible size, and with a mask only where it needs one.

Queries run down and keys to the right; ``#`` is computed, ``-`` is computed and masked, one box is one call::

    prompt: causal    same keys for all   branch after a context:     all other rows,
    (no mask)         tokens (no mask)    chunks of 64 queries        padded to the longest
    +----------+      +--------------+    +-----------+ chunk 1       +--------+
    |#         |      |##############|    |######-----|               |####----| row 0
    |##        |      |##############|    |########---|               |######--| row 1
    |###       |      |##############|    +-----------+---+ chunk 2   |########| row 2
    |####      |      |##############|    |##########-----|           +--------+
    |#####     |      +--------------+    |############---|
    +----------+                          +---------------+

A long span (one of the first three) gets calls of its own. The masks of its chunks are views of one small matrix, so
memory grows with the number of keys, not with its square. All other spans share one padded call. Calls of their own
save a fifth of the time of next-token decoding of prompts of 60 to 1 200 tokens, and little elsewhere
(benchmarks/attention_calls.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.modeling.fused.attention import Attention, InvariantAttention, PaddedAttention, Rows, attend_rows
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.spans import Span
from refusion_lit.modeling.visibility import AttentionMask, Visibility, additive_mask

_CALL = 1 << 17
"""Cost of one more call of attention on a CPU thread, in multiply-adds of queries and keys that take the same time.

Chosen by decoding with a small model on one and two threads: a call takes about ten microseconds.
"""

_MIN_CALLS = 32
"""If the padded batch has less work than this number of calls costs, planning the calls takes 4 to 6 % of a decode."""

_ALONE = 8
"""A span gets calls of its own if its work takes at least as long as this number of calls costs."""

_CHUNK = 64
"""Maximum number of queries in a chunk, which is the number of rows of its mask."""


def attention_for(
    rows: Rows,
    attention: AttentionMask | None,
    cache: KVCache | None,
    like: Tensor,
    width: int,
    *,
    batch_invariant: bool = False,
) -> Attention:
    """Choose the attention implementation of a forward.

    Args:
        rows: The batch.
        attention: Cache entries that tokens see or, without cache, tokens; ``None`` for causal attention over the
            tokens.
        cache: Prepared for the forward.
        like: A tensor of the states' type and device.
        width: Size of the query states, all heads together.
        batch_invariant: Run attention on CPUs in calls of one fixed shape.
    """
    if batch_invariant:  # its calls all have a mask
        num_rows, length = rows.shape
        causal = torch.ones(length, length, dtype=torch.bool).tril().expand(num_rows, -1, -1)
        mask = additive_mask(causal if attention is None else attention, length, like.dtype, like.device)
        return InvariantAttention(rows, mask, cache)
    if isinstance(attention, Visibility) and like.device.type == "cpu":
        call = _CALL * torch.get_num_threads() // width
        if attention.shape[0] * attention.shape[1] * attention.num_keys > _MIN_CALLS * call:
            found = segmented(rows, attention, cache, like.dtype, call)
            if found is not None:
                return found
    return PaddedAttention(rows, attention, cache, like)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows that share a call.

    Attributes:
        stored_rows: Their storage rows; a slice where they follow one another.
        keys: Stored entries that some of them see.
        num_queries: Number of queries of the longest row.
        tokens: The token at each place of the concatenated rows, any token at padding; a slice if there is no padding.
        mask: Additive mask; ``None`` for no mask.
        is_causal: Whether the i-th query sees the first i keys.
    """

    stored_rows: slice | Tensor
    keys: slice
    num_queries: int
    tokens: slice | Tensor
    mask: Tensor | None = None
    is_causal: bool = False

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Float[Tensor, "place head dim"]:
        """Return outputs of the rows' places."""
        own = query[self.tokens].unflatten(0, (-1, self.num_queries))
        keys, values = (stored[:, self.keys][self.stored_rows] for stored in (keys, values))
        return attend_rows(own, keys, values, self.mask, is_causal=self.is_causal).flatten(0, 1)


class SegmentedAttention:
    """Attention of one forward, segment by segment.

    Args:
        segments: The calls.
        places: Place of every token in their concatenated outputs; ``None`` if these are the tokens in order.
        rows: The batch.
        cache: Prepared for the forward; ``None`` if keys are the tokens themselves.
    """

    def __init__(
        self,
        segments: Sequence[_Segment],
        places: Int[Tensor, " token"] | None,
        rows: Rows,
        cache: KVCache | None,
    ) -> None:
        self._segments = segments
        self._places = places
        self._num_rows = rows.shape[0]
        self._cache = cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        if self._cache is None:
            keys, values = (states.unflatten(0, (self._num_rows, -1)) for states in (key, value))
        else:
            keys, values = self._cache.store(layer, key, value)
        if len(self._segments) == 1:
            found = self._segments[0](query, keys, values)
        else:
            found = torch.cat([segment(query, keys, values) for segment in self._segments])
        return found if self._places is None else found.index_select(0, self._places)


def segmented(
    rows: Rows, visibility: Visibility, cache: KVCache | None, dtype: torch.dtype, call: int
) -> SegmentedAttention | None:
    """Cut a forward's attention into calls; ``None`` if one call for all rows is as good.

    Args:
        rows: The batch; its real tokens are those of the spans, in their order.
        visibility: What they see.
        cache: Prepared for the forward.
        dtype: Type of the states.
        call: What a call costs, in pairs of a query and a key.
    """
    spans = visibility.spans
    storage = range(visibility.shape[0]) if cache is None else cache.prepared.sequences
    if len(spans) == 1 and visibility.shape[0] == 1 and (interval := spans[0].interval()) is not None:
        found = list(_span_segments(slice(storage[0], storage[0] + 1), 0, *interval, dtype))
        return SegmentedAttention(found, None, rows, cache)
    firsts = _first_tokens(rows, spans)
    segments: list[_Segment] = []
    tokens: list[np.ndarray] = []  # of each segment, -1 at padding
    shared: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        interval = span.interval()
        if interval is not None and span.length * (interval[1][-1] - interval[0]) >= _ALONE * call:
            row = slice(storage[span.sequence], storage[span.sequence] + 1)
            segments += _span_segments(row, firsts[number], *interval, dtype)
            tokens.append(np.arange(firsts[number], firsts[number] + span.length))
        else:
            shared.setdefault(span.sequence, []).append(number)
    if not segments:
        return None
    if shared:
        branches = [[(firsts[i], spans[i]) for i in own] for own in shared.values()]
        segment, own = _padded_segment(branches, [storage[sequence] for sequence in shared], dtype)
        segments.append(segment)
        tokens.append(own)
    return SegmentedAttention(segments, _places(np.concatenate(tokens), rows), rows, cache)


def _first_tokens(rows: Rows, spans: Sequence[Span]) -> list[int]:
    """Return the index of each span's first token among those that are computed."""
    if rows.real is None:
        return [span.sequence * rows.shape[1] + span.offset for span in spans]
    return list(accumulate((span.length for span in spans[:-1]), initial=0))


def _places(tokens: np.ndarray, rows: Rows) -> Tensor | None:
    """Return where each token's output is among those of the tokens given, -1 at padding."""
    num_tokens = rows.shape.numel() if rows.real is None else len(rows.real)
    if len(tokens) == num_tokens and (tokens == np.arange(num_tokens)).all():
        return None
    is_real = tokens >= 0
    places = np.zeros(num_tokens, dtype=np.int64)  # padding that is computed gets any output
    places[tokens[is_real]] = is_real.nonzero()[0]
    return torch.from_numpy(places)


def _span_segments(
    row: slice, first: int, start: int, stops: range | np.ndarray, dtype: torch.dtype
) -> Iterator[_Segment]:
    """Yield the calls of one span whose tokens see the entries from ``start`` to a stop each."""
    length = len(stops)
    last = int(stops[-1])
    is_causal = isinstance(stops, range) and last - start == length
    if is_causal or length == 1:
        yield _Segment(row, slice(start, last), length, slice(first, first + length), is_causal=length > 1)
        return
    masks: dict[bytes, Tensor] = {}
    for begin, end in _chunks(stops):
        stop = int(stops[end - 1])
        lag = stop - np.asarray(stops[begin:end])
        mask = None
        if lag[0]:
            key = lag.tobytes()
            if key not in masks:
                masks[key] = _lagging(lag, last - start, dtype)
            mask = masks[key][..., last - stop :]
        yield _Segment(row, slice(start, stop), end - begin, slice(first + begin, first + end), mask)


def _chunks(stops: range | np.ndarray) -> Iterator[tuple[int, int]]:
    """Cut tokens into chunks of few queries or of queries that see the same."""
    length = len(stops)
    if isinstance(stops, range):
        yield from ((begin, min(begin + _CHUNK, length)) for begin in range(0, length, _CHUNK))
        return
    borders = [*((np.diff(stops) > 0).nonzero()[0] + 1).tolist(), length]
    begin = 0
    for border, following in zip(borders, [*borders[1:], None], strict=True):
        if following is None or following - begin > _CHUNK:
            yield begin, border
            begin = border


def _lagging(lag: np.ndarray, num_keys: int, dtype: torch.dtype) -> Float[Tensor, "1 1 query key"]:
    """Return what is added to the scores of queries that see all keys but the last ones, a number for each query."""
    mask = torch.zeros(len(lag), num_keys, dtype=dtype)
    width = int(lag.max())
    hidden = torch.from_numpy(np.arange(width, 0, -1) <= lag[:, None])
    mask[:, num_keys - width :].masked_fill_(hidden, -torch.inf)
    return mask[None, None]


def _padded_segment(
    members: Sequence[Sequence[tuple[int, Span]]], storage: Sequence[int], dtype: torch.dtype
) -> tuple[_Segment, np.ndarray]:
    """Return a padded call for rows, and the token at each of its places, -1 at padding.

    Args:
        members: The first token and the span of each of a row's spans.
        storage: Storage row of each.
        dtype: Type of the states.
    """
    num_queries = max(sum(span.length for _, span in own) for own in members)
    num_keys = max(
        max(span.first_key + span.length, *(stop for _, stop in span.context), 0) for own in members for _, span in own
    )
    tokens = np.full((len(members), num_queries), -1, dtype=np.int64)
    spans: list[Span] = []
    for row, own in enumerate(members):
        offset = 0
        for first, span in own:
            tokens[row, offset : offset + span.length] = np.arange(first, first + span.length)
            spans.append(replace(span, sequence=row, offset=offset))
            offset += span.length
    mask = Visibility(spans, (len(members), num_queries), num_keys).additive_mask().to(dtype)[:, None]
    segment = _Segment(
        stored_rows=_index(np.array(storage)), keys=slice(0, num_keys), num_queries=num_queries,
        tokens=_index(np.maximum(tokens, 0).reshape(-1)), mask=mask,
    )  # fmt: skip
    return segment, tokens.reshape(-1)


def _index(numbers: np.ndarray) -> slice | Tensor:
    """Return an index for numbers: a slice, which copies nothing, where they follow one another."""
    first = int(numbers[0])
    if numbers[-1] - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(first, first + len(numbers))
    return torch.from_numpy(numbers)
