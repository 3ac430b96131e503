"""Random batches of sequences with unequal lengths over a KV cache, and slow attention to compare with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refusion_lit.modeling.fused.attention import Rows
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Span, Visibility

HEADS, KEY_HEADS, DIM = 4, 2, 6


@dataclass
class Ragged:
    """A padded batch of sequences, each of one or two spans of tokens.

    Attributes:
        rows: The batch's shape and the indices of its real tokens.
        visibility: What the spans see.
        mask: The visibility as a matrix (row, query, key); padding sees the key of its row's first token.
        plan: Arguments of ``KVCache.prepare``.
    """

    rows: Rows
    visibility: Visibility
    mask: Tensor
    plan: dict[str, Any]


def make_ragged(seed: int, sizes: list[tuple[int, int]], storage: list[int]) -> Ragged:
    """Draw a batch.

    Args:
        seed: Seed of the random choices.
        sizes: Numbers of queries and keys of each row.
        storage: The cache's row for each row of the batch.
    """
    chance = random.Random(seed)
    shape = len(sizes), max(queries for queries, _ in sizes)
    spans: list[Span] = []
    for row, (queries, keys) in enumerate(sizes):
        first_key, offset = chance.randint(0, keys - queries), 0
        one_span, two_halves = (queries,), (queries - queries // 2, queries // 2)
        for length in chance.choice([one_span, two_halves]):
            if length:  # half of a single query is no span
                spans.append(draw_span(chance, row, offset, length, first_key + offset, keys))
            offset += length
    num_keys = max(keys for _, keys in sizes)
    places = [(span, i) for span in spans for i in range(span.length)]
    real = torch.tensor([span.sequence * shape[1] + span.offset + i for span, i in places])
    rows = Rows(torch.Size(shape), real if len(real) < shape[0] * shape[1] else None)
    plan = {
        "rows": storage, "num_keys": num_keys, "source_index": rows.real,
        "row_index": torch.tensor([storage[span.sequence] for span, _ in places]),
        "cache_index": torch.tensor([span.first_key + i for span, i in places]),
    }  # fmt: skip
    return Ragged(rows, Visibility(spans, shape, num_keys), build_mask(spans, (*shape, num_keys)), plan)


def draw_span(chance: random.Random, row: int, offset: int, length: int, first_key: int, num_keys: int) -> Span:
    """Draw a span that sees random ranges of keys; typical cases (no context, a whole prefix) are drawn more often."""
    ends = [sorted(chance.choices(range(num_keys + 1), k=2)) for _ in range(chance.randint(1, 3))]
    context = chance.choice([(), ((0, first_key),), ((0, num_keys),), tuple((start, stop) for start, stop in ends)])
    bidirectional, blocks_of_three = [0] * length, [i // 3 for i in range(length)]
    random_order = sorted(chance.randrange(4) for _ in range(length))
    order = chance.choice([None, bidirectional, blocks_of_three, random_order])  # None is causal
    return Span(row, offset, length, first_key, context, order)


def build_mask(spans: list[Span], shape: tuple[int, int, int]) -> Tensor:
    """Return a matrix (row, query, key) of what is visible, entry by entry."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for span in spans:
        if span.offset == 0:
            mask[span.sequence, :, span.first_key] = True
    for span in spans:
        order = range(span.length) if span.order is None else span.order
        for query in range(span.length):
            for key in range(shape[2]):
                offset = key - span.first_key
                sees_itself = 0 <= offset < span.length and order[offset] <= order[query]
                in_context = any(start <= key < stop for start, stop in span.context)
                mask[span.sequence, span.offset + query, key] = sees_itself or in_context
    return mask


def draw_states(seed: int, num_tokens: int) -> list[Tensor]:
    """Return random queries, keys and values (token, head, dim)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, heads, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend_slowly(rows: Rows, mask: Tensor, cache: KVCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Store keys and values in the cache and compute attention a token and a head at a time."""
    stored_keys, stored_values = cache.store(0, key, value)
    real = range(rows.shape.numel()) if rows.real is None else rows.real.tolist()
    outputs = torch.empty_like(query)
    for token, place in enumerate(real):
        row, offset = divmod(place, rows.shape[1])
        seen = mask[row, offset].nonzero()[:, 0]
        for head in range(HEADS):
            storage_row = cache.sequences[row]
            key_head = head // (HEADS // KEY_HEADS)
            keys, values = stored_keys[storage_row, seen, key_head], stored_values[storage_row, seen, key_head]
            outputs[token, head] = (keys @ query[token, head] / DIM**0.5).softmax(0) @ values
    return outputs


def prepare_cache(plan: dict[str, Any], num_rows: int, seed: int) -> KVCache:
    """Return a cache that is full of random keys and values and prepared for a forward pass of a plan."""
    cache = KVCache(1, num_rows)  # one layer
    everywhere = torch.cartesian_prod(torch.arange(num_rows), torch.arange(plan["num_keys"]))
    cache.prepare(list(range(num_rows)), plan["num_keys"], None, *everywhere.unbind(1))
    cache.store(0, *draw_states(seed + 1, len(everywhere))[1:])
    cache.prepare(**plan)
    return cache
