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

Each span of a row with a long span gets calls of its own (one of the first three; with a mask if its keys are not one
interval). The masks of its chunks are views of one small matrix, so memory grows with the number of keys, not with its
square. All other rows share one padded call. Calls of their own save a fifth of the time of next-token decoding of
prompts of 60 to 1 200 tokens, and little elsewhere (benchmarks/attention_calls.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.modeling.fused.attention import (
    Call,
    RowAttention,
    Rows,
    additive_mask,
    invariant_attention,
    padded_call,
)
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask, Span, Visibility

_CALL = 1 << 17
"""Cost of one more call of attention on a CPU thread, in multiply-adds of queries and keys that take the same time.

Chosen by decoding with a small model on one and two threads: a call takes about ten microseconds.
"""

_MIN_CALLS = 32
"""If the padded batch has less work than this number of calls costs, planning the calls takes 4 to 6 % of a decode."""

_ALONE = 8
"""A row gets calls of its own if the work of one of its spans takes at least as long as this number of calls costs."""

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
) -> RowAttention:
    """Choose the calls of a forward's attention.

    Args:
        rows: The batch.
        attention: Cache entries that tokens see or, without cache, tokens; ``None`` for causal attention over the
            tokens.
        cache: Prepared for the forward.
        like: A tensor of the states' type and device.
        width: Size of the query states, all heads together.
        batch_invariant: Run attention on CPUs in calls of one fixed shape.
    """
    if batch_invariant:
        return invariant_attention(rows, attention, cache, like)
    calls: list[Call] = []
    if isinstance(attention, Visibility) and like.device.type == "cpu":
        call = _CALL * torch.get_num_threads() // width
        if attention.shape[0] * attention.shape[1] * attention.num_keys > _MIN_CALLS * call:
            calls = segmented(attention, cache, like.dtype, call)
    return RowAttention(rows, calls or [padded_call(rows, attention, cache, like)], cache)


def segmented(visibility: Visibility, cache: KVCache | None, dtype: torch.dtype, call: int) -> list[Call]:
    """Cut a forward's attention into calls; empty if one call for all rows is as good.

    Args:
        visibility: What its tokens see.
        cache: Prepared for the forward.
        dtype: Type of the states.
        call: What a call costs, in pairs of a query and a key.
    """
    storage = range(visibility.shape[0]) if cache is None else cache.sequences
    calls: list[Call] = []
    shared: list[Span] = []
    for _, group in groupby(visibility.spans, key=lambda span: span.sequence):
        spans = list(group)
        if any(_work(span) >= _ALONE * call for span in spans):
            calls += [each for span in spans for each in _span_calls(span, storage, dtype)]
        else:
            shared += spans
    if calls and shared:
        calls.append(_masked_call(shared, storage, dtype))
    return calls


def interval_of(span: Span) -> tuple[int, range | Int[np.ndarray, " token"]] | None:
    """Return the interval of keys that each token sees, as a common start and a stop for each token.

    Returns:
        ``None`` if the keys of some token are not a single interval from the common start. The stops are a ``range`` if
        each token sees one key more than the token before it.
    """
    first = span.first_key
    if span.order is None and len(span.context) < 2:  # most spans, without any array
        start, stop = span.context[0] if span.context else (first, first)
        if start >= stop or (stop == first and start < first):
            return min(start, first) if start < stop else first, range(first + 1, first + span.length + 1)
    stops = span.own_stops() + first
    (start, end), *others = sorted((low, high) for low, high in (*span.context, (first, int(stops[0]))) if low < high)
    for low, high in others:
        if low > end:
            return None
        end = max(end, high)
    return start, np.maximum(stops, end)


def _work(span: Span) -> int:
    """Return a span's pairs of a query and a key; 0 if its keys are not intervals, so that it needs a mask anyway."""
    interval = interval_of(span)
    return 0 if interval is None else span.length * int(interval[1][-1] - interval[0])


def _span_calls(span: Span, storage: Sequence[int], dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls of one span."""
    interval = interval_of(span)
    if interval is None:
        yield _masked_call([span], storage, dtype)
        return
    start, stops = interval
    row = storage[span.sequence]
    call = partial(Call, slice(span.sequence, span.sequence + 1), slice(row, row + 1))
    first = span.offset
    last = int(stops[-1])
    is_causal = isinstance(stops, range) and last - start == span.length
    if is_causal or span.length == 1:
        yield call(slice(first, first + span.length), slice(start, last), is_causal=span.length > 1)
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
        yield call(slice(first + begin, first + end), slice(start, stop), mask)


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


def _masked_call(spans: Sequence[Span], storage: Sequence[int], dtype: torch.dtype) -> Call:
    """Return one call with a mask for spans: all those of some rows, or one.

    Args:
        spans: The spans, by sequence and offset.
        storage: Storage row of each sequence.
        dtype: Type of the states.
    """
    sequences = {sequence: i for i, sequence in enumerate(dict.fromkeys(span.sequence for span in spans))}
    first = min(span.offset for span in spans)
    last = max(span.offset + span.length for span in spans)
    num_keys = max(max(span.first_key + span.length, *(stop for _, stop in span.context), 0) for span in spans)
    moved = [replace(span, sequence=sequences[span.sequence], offset=span.offset - first) for span in spans]
    mask = additive_mask(Visibility(moved, (len(sequences), last - first), num_keys), dtype)
    rows = _index(np.array([storage[sequence] for sequence in sequences]))
    return Call(_index(np.array([*sequences])), rows, slice(first, last), slice(num_keys), mask)


def _index(numbers: np.ndarray) -> slice | Tensor:
    """Return an index for numbers: a slice, which copies nothing, where they follow one another."""
    first = int(numbers[0])
    if numbers[-1] - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(first, first + len(numbers))
    return torch.from_numpy(numbers)
