"""Batch invariance: products and attention of fixed shapes make a token's results independent of the rest of a forward.

Libraries choose the order of summation by the shape of a product. A token's states therefore differ in their last bits
between a forward of one token and one of eight, or between a row alone and in a batch. In low precision that changes
texts. Here every product has 8 rows, and attention has 8 queries and a multiple of 512 keys, padded where necessary.
512 is the number of keys that torch's kernel processes at a time. So no result depends on the number of tokens, rows or
entries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.fused.rows import Rows, attend_rows
from refusion_lit.modeling.kv_cache import KVCache

NUM_ROWS = 8
"""Rows of a product, and queries of a call of attention."""

NUM_KEYS = 512
"""Keys that torch's attention on CPUs takes at a time."""


def in_blocks(product: Callable[[Tensor], Tensor], x: Float[Tensor, "*shape input"]) -> Float[Tensor, "*shape output"]:
    """Multiply ``NUM_ROWS`` rows at a time, the last ones padded.

    Args:
        product: A linear map of rows.
        x: Its input.
    """
    rows = x.reshape(-1, x.shape[-1])
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % NUM_ROWS)).split(NUM_ROWS)
    return torch.cat([product(block) for block in blocks])[: len(rows)].view(*x.shape[:-1], -1)


class InvariantAttention:
    """Attention of one forward in calls of one shape.

    Args:
        rows: The batch.
        mask: What is added to scores.
        cache: Prepared for the forward; ``None`` if keys are the tokens themselves.
    """

    def __init__(self, rows: Rows, mask: Float[Tensor, "batch 1 token key"], cache: KVCache | None) -> None:
        self._rows, self._cache = rows, cache
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
            stored, plan = self._cache.store(layer, key, value), self._cache.prepared
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
