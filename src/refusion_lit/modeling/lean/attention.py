"""Attention over the rows of a batch, which rarely have as many queries and keys as each other.

Everything but attention is computed for real tokens alone, laid end to end. Attention needs rows: one padded call for
all of them, or on CPUs a call for each group of rows of about the same size, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.lean.flex import FlexAttention
from refusion_lit.modeling.lean.rows import Attention, Rows

_CALL = 1 << 17
"""What a further call of attention costs a CPU thread, in multiply-adds of queries and keys that take as long.

Chosen by decoding with a small model on two threads and one: a call is about ten microseconds.
"""

_MIN_CALLS = 32
"""With less work than so many calls in the padded batch, looking for groups costs about what they save."""


class PaddedAttention:
    """One call for all rows, as long as the longest of them."""

    def __init__(
        self, rows: Rows, mask: Bool[Tensor, "batch token key"] | None, cache: KVCache | None, dtype: torch.dtype
    ) -> None:
        self._rows, self._cache = rows, cache
        # Given booleans, attention would make this of them in every layer.
        self._mask = None if mask is None else additive_of(mask, dtype)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        batch = self._rows.shape[0]
        if self._cache is None:
            key, value = key.unflatten(0, (batch, -1)), value.unflatten(0, (batch, -1))
        else:
            key, value = self._cache.update(layer, key, value)
        mixed = attend_rows(self._rows.padded(query).unflatten(0, (batch, -1)), key, value, self._mask)
        return self._rows.real_of(mixed.flatten(0, 1))


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that share a call.

    Attributes:
        stored_rows: Their storage rows, a slice where they follow one another.
        num_queries: Of the longest row.
        num_keys: Up to the last one that any of the rows sees.
        tokens: The token at each place of the rows laid end to end, any token at padding; a slice where there is none.
        mask: What is added to scores.
    """

    stored_rows: slice | Tensor
    num_queries: int
    num_keys: int
    tokens: slice | Tensor
    mask: Tensor

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return outputs [places of the rows, head, dim]."""
        own = query[self.tokens].unflatten(0, (-1, self.num_queries))
        keys, values = (stored[:, : self.num_keys][self.stored_rows] for stored in (keys, values))
        return attend_rows(own, keys, values, self.mask).flatten(0, 1)


class GroupedAttention:
    """A call for each group of rows, only as long as the group's longest row. For CPUs: it reads the mask.

    Args:
        groups: Rows of the batch, each in one group.
        sizes: Queries and keys of every row.
        rows: The batch.
        mask: Over the cache's entries.
        cache: Prepared for the forward.
        dtype: Type of the states.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        sizes: np.ndarray,
        rows: Rows,
        mask: Bool[Tensor, "batch token key"],
        cache: KVCache,
        dtype: torch.dtype,
    ) -> None:
        self._cache = cache
        real = np.arange(rows.shape.numel()) if rows.real is None else rows.real.numpy()
        token_at, place_at = np.zeros(rows.shape, dtype=np.int64), np.empty(rows.shape, dtype=np.int64)
        token_at.reshape(-1)[real] = np.arange(len(real))
        self._groups: list[_Group] = []
        num_places = 0
        for group in groups:
            num_queries, num_keys = sizes[group].max(0).tolist()
            tokens = token_at[group, :num_queries].reshape(-1)
            place_at[group, :num_queries] = np.arange(num_places, num_places + len(tokens)).reshape(len(group), -1)
            num_places += len(tokens)
            self._groups.append(
                _Group(
                    stored_rows=_index(np.array([cache.prepared.sequences[row] for row in group])),
                    num_queries=num_queries,
                    num_keys=num_keys,
                    tokens=_index(tokens),
                    mask=additive_of(mask[group, :num_queries, :num_keys], dtype),
                )
            )
        self._places = torch.from_numpy(place_at.reshape(-1)[real])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        keys, values = self._cache.store(layer, key, value)
        return torch.cat([group(query, keys, values) for group in self._groups]).index_select(0, self._places)


def attention_for(
    rows: Rows,
    mask: Bool[Tensor, "batch token key"] | None,
    cache: KVCache | None,
    dtype: torch.dtype,
    width: int,
    implementation: str = "sdpa",
) -> Attention:
    """Choose how a forward attends.

    Args:
        rows: The batch.
        mask: Over the cache's entries or, without cache, tokens; ``None`` for causal attention over the tokens.
        cache: Prepared for the forward.
        dtype: Type of the states.
        width: Of the query heads' states, all heads together.
        implementation: ``sdpa`` or ``flex_attention``.
    """
    if implementation == "flex_attention" and mask is not None:
        return FlexAttention(rows, mask, cache)
    if mask is not None and cache is not None and mask.device.type == "cpu":
        call = _CALL * torch.get_num_threads() // width
        if mask.numel() > _MIN_CALLS * call:
            sizes = _sizes(rows, mask)
            groups = _groups(sizes.tolist(), call)
            if len(groups) > 1:
                return GroupedAttention(groups, sizes, rows, mask, cache, dtype)
    return PaddedAttention(rows, mask, cache, dtype)


def _sizes(rows: Rows, mask: Tensor) -> np.ndarray:
    """Return how many queries and keys each row needs [row, 2], up to the last real and the last visible one."""
    batch, length = rows.shape
    sizes = np.full((batch, 2), length)
    if rows.real is not None:
        sizes[:, 0] = 0
        row, offset = np.divmod(rows.real.numpy(), length)
        np.maximum.at(sizes[:, 0], row, offset + 1)
    sizes[:, 1] = mask.shape[2] - np.any(mask.numpy(), axis=1)[:, ::-1].argmax(1)
    return sizes


def _groups(sizes: Sequence[Sequence[int]], call: int) -> list[list[int]]:
    """Put rows into groups whose calls together are cheap: a row joins where it adds less padding than a call costs.

    Args:
        sizes: Queries and keys of every row.
        call: What a call costs, in pairs of a query and a key.
    """
    groups: list[list[int]] = []
    num_queries = num_keys = 0
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row][0] * sizes[row][1]):
        queries, keys = sizes[row]
        more_queries, more_keys = max(queries, num_queries), max(keys, num_keys)
        before = len(groups[-1]) * num_queries * num_keys if groups else 0
        after = (len(groups[-1]) + 1) * more_queries * more_keys if groups else 0
        if groups and after - before - queries * keys < call:
            groups[-1].append(row)
            num_queries, num_keys = more_queries, more_keys
        else:
            groups.append([row])
            num_queries, num_keys = queries, keys
    return groups


def _index(numbers: np.ndarray) -> slice | Tensor:
    """Return an index for numbers: a slice, which copies nothing, where they follow one another."""
    first = int(numbers[0])
    if numbers[-1] - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(first, first + len(numbers))
    return torch.from_numpy(numbers)


def additive_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores [row, 1, query, key]."""
    return torch.where(mask, 0.0, -torch.inf).to(dtype)[:, None]


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend row by row.

    Args:
        query: States [row, place, head, dim].
        key: Likewise; there may be fewer heads, which query heads share.
        value: Likewise.
        mask: What is added to scores; ``None`` for causal attention.

    Returns:
        The heads' outputs, laid out like the queries.
    """
    times = query.shape[2] // key.shape[2]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    grouped = times > 1
    if grouped and query.device.type != "cpu":  # with a mask, only CPUs have a fast kernel for grouped heads
        key, value = (_repeated(states, times) for states in (key, value))
        grouped = False
    mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def _repeated(states: Tensor, times: int) -> Tensor:
    """Repeat every key/value head [row, head, key, dim] for the query heads that share it."""
    return states[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
