"""Ragged rows to test attention over a cache with, and attention a token at a time."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.lean.rows import Rows

HEADS, KEY_HEADS, DIM = 4, 2, 6


def ragged(seed: int, sizes: list[tuple[int, int]], storage: list[int]) -> tuple[Rows, Tensor, dict[str, Any]]:
    """Return rows of so many queries and keys, what they see, and what a cache is told; a row may hold two branches."""
    chance = random.Random(seed)
    length, num_keys = (max(column) for column in zip(*sizes, strict=True))
    mask = torch.zeros(len(sizes), length, num_keys, dtype=torch.bool)
    real, row_index, cache_index = [], [], []
    for row, (queries, keys) in enumerate(sizes):
        seen = torch.rand(queries, keys, generator=torch.Generator().manual_seed(chance.randrange(999))) < 0.5
        mask[row, :, 0] = True
        mask[row, :queries, :keys] |= seen
        mask[row, queries - 1, keys - 1] = True
        real += [row * length + offset for offset in range(queries)]
        row_index += [storage[row]] * queries
        cache_index += chance.sample(range(keys), queries)
    padded = len(real) < len(sizes) * length
    rows = Rows(torch.Size((len(sizes), length)), torch.tensor(real) if padded else None)
    plan = {
        "rows": storage, "num_keys": num_keys, "source_index": rows.real, "row_index": torch.tensor(row_index),
        "cache_index": torch.tensor(cache_index),
    }  # fmt: skip
    return rows, mask, plan


def states(seed: int, num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, heads, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_hand(rows: Rows, mask: Tensor, cache: KVCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention a token at a time over what a cache holds after a forward."""
    stored_keys, stored_values = cache.store(0, key, value)
    real = range(rows.shape.numel()) if rows.real is None else rows.real.tolist()
    found = torch.empty_like(query)
    for token, place in enumerate(real):
        row, offset = divmod(place, rows.shape[1])
        seen = mask[row, offset].nonzero()[:, 0]
        for head in range(HEADS):
            storage_row = cache.prepared.sequences[row]
            keys, values = (
                one[storage_row, seen, head // (HEADS // KEY_HEADS)] for one in (stored_keys, stored_values)
            )
            found[token, head] = (keys @ query[token, head] / DIM**0.5).softmax(0) @ values
    return found


def prepared(plan: dict[str, Any], num_rows: int, seed: int) -> KVCache:
    """Return a cache with something stored everywhere."""
    cache = KVCache(1, num_rows)
    everywhere = torch.cartesian_prod(torch.arange(num_rows), torch.arange(plan["num_keys"]))
    cache.prepare(list(range(num_rows)), plan["num_keys"], None, *everywhere.unbind(1))
    cache.store(0, *states(seed + 1, len(everywhere))[1:])
    cache.prepare(**plan)
    return cache
