"""Attention in the fused backbone, over padded rows.

All other operations run on real tokens only, concatenated without padding. Attention needs rows, padded to the longest
row, and computes all rows in a single call. On CPUs, a mask with more than ``_MAX_MASK`` elements would take too much
memory. The queries are then cut into chunks, and every layer computes the chunks' masks again.

Batch invariance: libraries choose the summation order by the product's shape. A token's last bits therefore depend on
the numbers of tokens and rows in the forward pass. In low precision, this changes texts. With ``batch_invariant``,
every product has 8 rows (:class:`~refusion_lit.modeling.fused.linear.Linear`), and attention has 8 queries and a
multiple of 512 keys, padded if necessary, because torch's kernel processes 512 keys at a time. Results then do not
depend on the number of tokens, rows or entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.attention import RangeMask
from refusion_lit.modeling.fused.linear import NUM_ROWS
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.transformers_forward import sdpa_mask
from refusion_lit.modeling.visibility import AttentionMask, Visibility, as_mask

_TRIANGLE = np.tri(128, dtype=bool)
"""Causal matrices for short spans are views of this matrix."""

NUM_KEYS = 512
"""Number of keys per step in torch's attention on CPUs."""

_MAX_MASK = 1 << 22
"""Maximum number of mask elements per call, on CPUs; 16 MB in float32."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Places of real tokens (not padding) in a padded batch.

    Attributes:
        shape: The batch's shape.
        real: The real tokens' flat indices, in computing order; ``None`` if no token is padding.
    """

    shape: torch.Size
    real: Tensor | None

    def pad(self, states: Float[Tensor, "token ..."]) -> Float[Tensor, "row place ..."]:
        """Scatter the real tokens' states to their places; padding gets zeros."""
        if self.real is not None:
            states = states.new_zeros(self.shape.numel(), *states.shape[1:]).index_copy_(0, self.real, states)
        return states.view(*self.shape, *states.shape[1:])

    def widen(self, width: int) -> Rows:
        """Return the batch with more padding in every row."""
        real = torch.arange(self.shape.numel()) if self.real is None else self.real
        length = self.shape[1]
        return Rows(torch.Size((self.shape[0], width)), real // length * width + real % length)

    def select_real(self, states: Tensor) -> Tensor:
        """Return the real tokens' states."""
        return states if self.real is None else states[self.real]


_MOST_SHARING = 32
"""On CPUs, up to this many bfloat16 queries whose heads share keys run faster as a single head (shared_heads.py)."""


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Attend row by row.

    Args:
        query: States [row, place, head, dim].
        key: States in the same layout; several query heads may share a head.
        value: States in the layout of ``key``.
        mask: Added to scores [row, 1, place, key]; ``None``: no mask.
        is_causal: Whether the i-th query sees the first i keys; only without a mask.

    Returns:
        The heads' outputs, in the queries' layout.
    """
    num_queries = query.shape[1]
    times = query.shape[2] // key.shape[2]
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    if times == 1:
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    elif query.device.type != "cpu":  # with a mask, only CPUs have a fast kernel for grouped heads
        key, value = (states.repeat_interleave(times, 1) for states in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    elif is_causal or query.element_size() > 2 or times * num_queries > _MOST_SHARING:
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=True)
    else:
        query = rearrange(query, "row (key_head times) place dim -> row key_head (times place) dim", times=times)
        mask = None if mask is None else mask.repeat(1, 1, times, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        mixed = rearrange(mixed, "row key_head (times place) dim -> row (key_head times) place dim", times=times)
    return mixed.transpose(1, 2)


_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Call:
    """An attention call, for places in all rows of a batch.

    Attributes:
        places: The queries' places in their rows; ``slice(None)`` if a forward pass has a single call.
        keys: Stored entries that the queries may see.
        mask: Added to scores [row, 1, place, key], or a function that computes it; ``None``: no mask.
        is_causal: Whether the i-th query sees the first i keys.
    """

    places: slice
    keys: slice
    mask: Tensor | Callable[[], Tensor] | None = None
    is_causal: bool = False

    def __call__(
        self,
        query: Float[Tensor, "row place head dim"],
        keys: Float[Tensor, "stored_row entry key_head dim"],
        values: Float[Tensor, "stored_row entry key_head dim"],
        storage: slice | Tensor,
    ) -> Float[Tensor, "row called_place head dim"]:
        """Return the heads' outputs; ``storage`` has the storage rows of the batch's rows."""
        keys, values = (stored[storage, self.keys] for stored in (keys, values))
        mask = self.mask() if callable(self.mask) and not isinstance(self.mask, Tensor) else self.mask
        return attend_rows(query[:, self.places], keys, values, mask, is_causal=self.is_causal)


class RowAttention:
    """Attention in a forward pass.

    Args:
        rows: The batch.
        calls: Calls that compute all real tokens.
        cache: Prepared for the forward pass; ``None`` if keys are the tokens themselves.
    """

    def __init__(self, rows: Rows, calls: Sequence[Call], cache: KVCache | None) -> None:
        self._rows = rows
        self._calls = calls
        self._cache = cache

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "token head dim"],
        key: Float[Tensor, "token key_head dim"],
        value: Float[Tensor, "token key_head dim"],
    ) -> Float[Tensor, "token head dim"]:
        """Store the real tokens' keys and values in a layer, and return the heads' outputs."""
        rows = self._rows
        if self._cache is None:
            stored = rows.pad(key), rows.pad(value), _ALL
        else:
            stored = *self._cache.store(layer, key, value), self._cache.rows
        query = rows.pad(query)
        if self._calls[0].places == _ALL:
            mixed = self._calls[0](query, *stored)
        else:
            mixed = torch.zeros_like(query)  # padding must be finite: later layers may compute it
            for call in self._calls:
                mixed[:, call.places] = call(query, *stored)
        return rows.select_real(mixed.flatten(0, 1))


def plan_attention(
    rows: Rows,
    attention: AttentionMask | None,
    cache: KVCache | None,
    like: Tensor,
    *,
    batch_invariant: bool = False,
) -> RowAttention:
    """Plan the attention calls in a forward pass.

    Args:
        rows: The batch.
        attention: The cache entries (without a cache, the tokens) that tokens see; ``None``: causal attention over the
            tokens.
        cache: Prepared for the forward pass.
        like: A tensor with the states' type and device.
        batch_invariant: Run attention on CPUs in calls with a fixed shape.
    """
    if batch_invariant:
        return invariant_attention(rows, attention, cache, like)
    if isinstance(attention, Visibility) and like.device.type == "cpu":
        size = attention.shape[0] * attention.shape[1] * attention.num_keys
        if size > _MAX_MASK and not attention.is_causal and not attention.sees_all_keys:
            return RowAttention(rows, chunked_calls(attention, like.dtype), cache)
    return RowAttention(rows, [padded_call(rows, attention, cache, like)], cache)


def chunked_calls(visibility: Visibility, dtype: torch.dtype, max_mask: int = _MAX_MASK) -> list[Call]:
    """Return a call per chunk of queries, with the keys that the chunk's queries see.

    Args:
        visibility: What the tokens see.
        dtype: The states' type.
        max_mask: Maximum number of mask elements in a call.
    """
    num_rows, length = visibility.shape
    size = max(max_mask // (num_rows * visibility.num_keys), 1)
    calls = []
    for start in range(0, length, size):
        part = visibility.cut(start, min(start + size, length))
        calls.append(Call(slice(start, start + size), slice(part.num_keys), partial(additive_mask, part, dtype)))
    return calls


def padded_call(rows: Rows, attention: AttentionMask | None, cache: KVCache | None, like: Tensor) -> Call:
    """Return a single call for all rows, padded to the longest row.

    Args:
        rows: The batch.
        attention: Keys that the tokens see; ``None``: causal attention over the tokens.
        cache: Prepared for the forward pass; ``None`` if keys are the tokens themselves.
        like: A tensor with the states' type and device.
    """
    num_tokens = rows.shape[1]
    keys = _ALL if cache is None else slice(cache.num_keys)
    if attention is None:
        return Call(_ALL, keys, is_causal=True)
    if isinstance(attention, Visibility):
        if attention.is_causal:
            first = attention.spans[0].first_key
            return Call(_ALL, slice(first, first + num_tokens), is_causal=True)
        if attention.sees_all_keys:
            return Call(_ALL, keys)
    elif isinstance(ranges := sdpa_mask(attention, num_tokens, like.device), RangeMask):
        return Call(_ALL, keys, ranges)
    # Attention would convert a boolean mask in every layer.
    return Call(_ALL, keys, _additive(attention, num_tokens, like.dtype, like.device))


def _additive(
    attention: AttentionMask, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "batch 1 token key"]:
    """Convert a mask to summands for attention scores: 0 or -inf."""
    if isinstance(attention, Visibility) and device.type == "cpu":
        return additive_mask(attention, dtype)
    return torch.where(as_mask(attention, device, num_keys), 0.0, -torch.inf).to(dtype)[:, None]


def additive_mask(visibility: Visibility, dtype: torch.dtype) -> Float[Tensor, "batch 1 token key"]:
    """Return the summands for attention scores, on the host: 0 for visible keys, else -inf.

    Padding sees the sequence's first key, because a query without keys gives NaN.
    """
    matrix = np.full((*visibility.shape, visibility.num_keys), -np.inf, np.float32)
    is_padded = sum(span.length for span in visibility.spans) < visibility.shape[0] * visibility.shape[1]
    for span in visibility.spans:
        if is_padded and span.offset == 0:
            matrix[span.sequence, :, span.first_key] = 0  # what padding sees
        tokens = matrix[span.sequence, span.offset : span.offset + span.length]
        if is_padded:
            tokens[:] = -np.inf
        for start, stop in span.context:
            tokens[:, start:stop] = 0
        in_span = tokens[:, span.first_key : span.first_key + span.length]
        np.copyto(in_span, 0, where=_span_mask(span.order, span.length))
    return torch.from_numpy(matrix).to(dtype)[:, None]


def _span_mask(order: Sequence[int] | None, length: int) -> Bool[np.ndarray, "token token"]:
    """Return which tokens in a span see one another."""
    if order is None:
        return _TRIANGLE[:length, :length] if length <= len(_TRIANGLE) else np.tri(length, dtype=bool)
    orders = np.asarray(order)
    return orders[None, :] <= orders[:, None]


def invariant_attention(
    rows: Rows, attention: AttentionMask | None, cache: KVCache | None, like: Tensor
) -> RowAttention:
    """Return attention in calls with a fixed shape; see :func:`padded_call` for the arguments."""
    num_rows, length = rows.shape
    if attention is None:
        attention = torch.ones(length, length, dtype=torch.bool).tril().expand(num_rows, -1, -1)
    mask = _additive(attention, length, like.dtype, like.device)
    calls: list[Call] = []
    for start in range(0, length, NUM_ROWS):
        block = mask[:, :, start : start + NUM_ROWS]
        num_keys = _round_up(int((block > -torch.inf).nonzero()[:, 3].max()) + 1, NUM_KEYS)
        padded = block.new_full((num_rows, 1, NUM_ROWS, num_keys), -torch.inf)
        padded[..., 0] = 0.0  # padding sees a key: a query without keys gives NaN
        block = block[..., :num_keys]
        padded[:, :, : block.shape[2], : block.shape[3]] = block
        calls.append(Call(slice(start, start + NUM_ROWS), slice(num_keys), padded))
    # Round up to whole blocks of queries and, if the keys are the tokens themselves, of keys.
    return RowAttention(rows.widen(_round_up(length, NUM_KEYS if cache is None else NUM_ROWS)), calls, cache)


def _round_up(number: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-number // step) * step
