"""Attention of the fused backbone over padded rows: in one call, or in calls of one shape for batch invariance.

All other operations run on real tokens only, concatenated without padding. Attention needs rows, which usually differ
in their numbers of queries and keys. On CPUs, :mod:`~refusion_lit.modeling.fused.segments` cuts it into several calls.

Batch invariance: libraries choose the order of summation by the shape of a product. A token's states therefore differ
in their last bits between a forward of one token and one of eight, or between a row alone and in a batch. In low
precision that changes texts. With ``batch_invariant``, every product has 8 rows
(:func:`~refusion_lit.modeling.fused.linear.in_blocks`), and attention has 8 queries and a multiple of 512 keys, padded
where necessary. 512 is the number of keys that torch's kernel processes at a time. So no result depends on the number
of tokens, rows or entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.attention import RangeMask, sdpa_mask
from refusion_lit.modeling.fused.linear import NUM_ROWS
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask, Visibility, additive_mask

NUM_KEYS = 512
"""Keys that torch's attention on CPUs takes at a time."""


@runtime_checkable
class Attention(Protocol):
    """Attention of one forward."""

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "token head dim"],
        key: Float[Tensor, "token key_head dim"],
        value: Float[Tensor, "token key_head dim"],
    ) -> Float[Tensor, "token head dim"]:
        """Store a layer's keys and values of the real tokens, and return the heads' outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Places of the real tokens (all but padding) in a padded batch.

    Attributes:
        shape: Of the batch.
        real: Their flat indices, in the order they are computed in; ``None`` if nothing is padding.
    """

    shape: torch.Size
    real: Tensor | None

    def padded(self, states: Tensor) -> Tensor:
        """Scatter states of the real tokens to their places [tokens of all rows, ...]; zeros at padding."""
        if self.real is None:
            return states
        return states.new_zeros(self.shape.numel(), *states.shape[1:]).index_copy_(0, self.real, states)

    def real_of(self, states: Tensor) -> Tensor:
        """Take the states of the real tokens."""
        return states if self.real is None else states[self.real]


_MOST_SHARING = 32
"""On CPUs, up to this many bfloat16 queries of heads that share keys run faster as one head (shared_heads.py)."""


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Attend row by row.

    Args:
        query: States [row, place, head, dim].
        key: Likewise; there may be fewer heads, which query heads share.
        value: Likewise.
        mask: What is added to scores [row, 1, place, key]; ``None`` for none.
        is_causal: Whether the i-th query sees the first i keys; goes without a mask.

    Returns:
        The heads' outputs, laid out like the queries.
    """
    num_queries = query.shape[1]
    times = query.shape[2] // key.shape[2]
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    if times == 1:
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    elif query.device.type != "cpu":  # with a mask, only CPUs have a fast kernel for grouped heads
        key, value = (_repeated(states, times) for states in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    elif is_causal or query.element_size() > 2 or times * num_queries > _MOST_SHARING:
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=True)
    else:
        query = rearrange(query, "row (key_head times) place dim -> row key_head (times place) dim", times=times)
        mask = None if mask is None else mask.repeat(1, 1, times, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        mixed = rearrange(mixed, "row key_head (times place) dim -> row (key_head times) place dim", times=times)
    return mixed.transpose(1, 2)


def _repeated(states: Tensor, times: int) -> Tensor:
    """Repeat every key/value head [row, head, key, dim] for the query heads that share it."""
    return states[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


class PaddedAttention:
    """Attention of all rows in one call, padded to the longest row.

    Args:
        rows: The batch.
        attention: Keys that its tokens see; ``None`` for causal attention over the tokens.
        cache: Prepared for the forward; ``None`` if keys are the tokens themselves.
        like: A tensor of the states' type and device.
    """

    def __init__(
        self,
        rows: Rows,
        attention: AttentionMask | None,
        cache: KVCache | None,
        like: Tensor,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._is_causal = attention is None or (isinstance(attention, Visibility) and attention.is_causal)
        self._mask = None if attention is None or self._is_causal else _mask_of(attention, rows.shape[1], like)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        rows = self._rows
        if self._cache is None or self._is_causal:  # tokens that see only each other read no entry of the cache
            if self._cache is not None:
                self._cache.store(layer, key, value)
            key, value = (rows.padded(states).view(*rows.shape, *states.shape[1:]) for states in (key, value))
        else:
            key, value = self._cache.update(layer, key, value)
        query = rows.padded(query).view(*rows.shape, *query.shape[1:])
        mixed = attend_rows(query, key, value, self._mask, is_causal=self._is_causal)
        return rows.real_of(mixed.flatten(0, 1))


def _mask_of(attention: AttentionMask, num_tokens: int, like: Tensor) -> Tensor | None:
    """Return an additive mask [row, 1, query, key]; attention would convert a boolean mask in every layer."""
    if isinstance(attention, Visibility):
        return None if attention.is_full else additive_mask(attention, num_tokens, like.dtype, like.device)
    found = sdpa_mask(attention, num_tokens, like.device)
    return found if isinstance(found, RangeMask) else additive_mask(found[:, 0], num_tokens, like.dtype, like.device)


class InvariantAttention:
    """Attention of one forward in calls of one shape.

    Args:
        rows: The batch.
        mask: What is added to scores.
        cache: Prepared for the forward; ``None`` if keys are the tokens themselves.
    """

    def __init__(self, rows: Rows, mask: Float[Tensor, "batch 1 token key"], cache: KVCache | None) -> None:
        self._rows = rows
        self._cache = cache
        num_rows, _, num_queries, num_keys = mask.shape
        shape = num_rows, 1, _up(num_queries, NUM_ROWS), _up(num_keys, NUM_KEYS)
        padded = mask.new_full(shape, -torch.inf)
        padded[..., 0] = 0.0  # padding sees something: seeing nothing gives NaN
        padded[:, :, :num_queries, :num_keys] = mask
        self._num_keys = shape[3]
        blocks = padded.split(NUM_ROWS, 2)
        ends = [_up(int((block > -torch.inf).nonzero()[:, 3].max()) + 1, NUM_KEYS) for block in blocks]
        self._masks = [block[..., :end] for block, end in zip(blocks, ends, strict=True)]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        rows = self._rows
        if self._cache is None:
            keys, values = (rows.padded(states).unflatten(0, (rows.shape[0], -1)) for states in (key, value))
        else:
            stored = self._cache.store(layer, key, value)
            plan = self._cache.prepared
            keys, values = (states if plan.rows is None else states[plan.rows] for states in stored)
        keys, values = (self._of_length(states) for states in (keys, values))
        query = rows.padded(query).unflatten(0, (rows.shape[0], -1))
        query = F.pad(query, (0, 0, 0, 0, 0, -query.shape[1] % NUM_ROWS))
        mixed = [
            attend_rows(queries, keys[:, : mask.shape[3]], values[:, : mask.shape[3]], mask)
            for queries, mask in zip(query.split(NUM_ROWS, 1), self._masks, strict=True)
        ]
        return rows.real_of(torch.cat(mixed, 1)[:, : rows.shape[1]].flatten(0, 1))

    def _of_length(self, states: Tensor) -> Tensor:
        missing = self._num_keys - states.shape[1]
        return F.pad(states, (0, 0, 0, 0, 0, missing)) if missing > 0 else states


def _up(number: int, step: int) -> int:
    """Return the next multiple of a number."""
    return -(-number // step) * step
