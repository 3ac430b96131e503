"""Attention of the fused backbone: chooses one padded call or, on CPUs, several calls.

All other operations run on real tokens only, concatenated without padding. Attention needs rows, which usually differ
in their numbers of queries and keys.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.modeling.fused.invariant import InvariantAttention
from refusion_lit.modeling.fused.rows import Attention, Rows, additive_of, attend_rows
from refusion_lit.modeling.fused.segments import segmented
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.range_mask import matrix_of, sdpa_mask
from refusion_lit.modeling.visibility import Visibility, as_mask

_CALL = 1 << 17
"""Cost of one more call of attention on a CPU thread, in multiply-adds of queries and keys that take the same time.

Chosen by decoding with a small model on one and two threads: a call takes about ten microseconds.
"""

_MIN_CALLS = 32
"""If the padded batch has less work than this number of calls costs, cutting it into calls saves no time."""


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
        attention: Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"] | None,
        cache: KVCache | None,
        like: Tensor,
    ) -> None:
        self._rows, self._cache = rows, cache
        self._is_causal = attention is None or (isinstance(attention, Visibility) and attention.is_causal)
        self._mask = None if attention is None or self._is_causal else _mask_of(attention, like)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        rows = self._rows
        if self._cache is None or self._is_causal:  # tokens that see only each other read no entry of the cache
            if self._cache is not None:
                self._cache.store(layer, key, value)
            key, value = (rows.padded(states).unflatten(0, (rows.shape[0], -1)) for states in (key, value))
        else:
            key, value = self._cache.update(layer, key, value)
        query = rows.padded(query).unflatten(0, (rows.shape[0], -1))
        mixed = attend_rows(query, key, value, self._mask, is_causal=self._is_causal)
        return rows.real_of(mixed.flatten(0, 1))


def _mask_of(
    attention: Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"], like: Tensor
) -> Tensor | None:
    """Return an additive mask [row, 1, query, key]; attention would convert a boolean mask in every layer."""
    if isinstance(attention, Visibility):
        if attention.is_full:
            return None
        if like.device.type == "cpu":
            return attention.additive_mask().to(like.dtype)[:, None]
        attention = as_mask(attention, like.device)
    found = sdpa_mask(attention, attention.shape[1])
    return additive_of(found[:, 0], like.dtype) if found.dtype == torch.bool else found


def _whole_mask(
    rows: Rows,
    attention: Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "batch 1 token key"]:
    """Return the additive mask, also in cases in which other kernels need no matrix."""
    if isinstance(attention, Visibility):
        return attention.additive_mask().to(dtype)[:, None]
    num_rows, num_tokens = rows.shape
    if attention is None:
        attention = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril().expand(num_rows, -1, -1)
    return additive_of(matrix_of(attention, num_tokens), dtype)


def attention_for(
    rows: Rows,
    attention: Visibility | Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"] | None,
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
    if batch_invariant:
        return InvariantAttention(rows, _whole_mask(rows, attention, like.dtype), cache)
    if isinstance(attention, Visibility) and like.device.type == "cpu":
        call = _CALL * torch.get_num_threads() // width
        if attention.shape[0] * attention.shape[1] * attention.num_keys > _MIN_CALLS * call:
            found = segmented(rows, attention, cache, like.dtype, call)
            if found is not None:
                return found
    return PaddedAttention(rows, attention, cache, like)
