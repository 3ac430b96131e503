from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.modeling import lean_attention
from refusion_lit.modeling.kv_cache import SlotCache
from refusion_lit.modeling.lean_attention import GroupedAttention, PaddedAttention, attention_for
from refusion_lit.modeling.lean_rows import Rows

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


def by_hand(rows: Rows, mask: Tensor, cache: SlotCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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


def prepared(plan: dict[str, Any], num_rows: int, seed: int) -> SlotCache:
    """Return a cache with something stored everywhere."""
    cache = SlotCache(1, num_rows)
    everywhere = torch.cartesian_prod(torch.arange(num_rows), torch.arange(plan["num_keys"]))
    cache.prepare(list(range(num_rows)), plan["num_keys"], None, *everywhere.unbind(1))
    cache.store(0, *states(seed + 1, len(everywhere))[1:])
    cache.prepare(**plan)
    return cache


SIZE = st.integers(1, 9).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 14)))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 9999),
    sizes=st.lists(SIZE, min_size=1, max_size=6),
    call=st.integers(0, 80),
    spare=st.integers(0, 2),
)
def test_groups_of_rows_attend_as_each_token_does_alone(
    seed: int, sizes: list[tuple[int, int]], call: int, spare: int
) -> None:
    num_rows = len(sizes) + spare
    storage = random.Random(seed).sample(range(num_rows), len(sizes))
    rows, mask, plan = ragged(seed, sizes, storage)
    query, key, value = states(seed, len(plan["row_index"]))
    table = lean_attention._sizes(rows, mask)
    assert table.tolist() == [list(size) for size in sizes]
    groups = lean_attention._groups(table.tolist(), call)
    assert sorted(itertools.chain(*groups)) == list(range(len(sizes)))
    found = []
    for kind in ("grouped", "padded"):
        cache = prepared(plan, num_rows, seed)
        attend = PaddedAttention(rows, mask, cache, torch.float64)
        if kind == "grouped":
            attend = GroupedAttention(groups, table, rows, mask, cache, torch.float64)
        found.append(attend(0, query, key, value))
        torch.testing.assert_close(found[-1], by_hand(rows, mask, cache, query, key, value))
    torch.testing.assert_close(*found)


def test_rows_share_a_call_where_padding_costs_less_than_another_call() -> None:
    sizes = [(4, 10), (64, 90), (4, 12), (60, 90)]
    assert lean_attention._groups(sizes, 4 * 90 + 1) == [[1, 3], [2, 0]]
    assert lean_attention._groups(sizes, 4 * 90) == [[1], [3], [2, 0]]
    assert lean_attention._groups(sizes, 4 * 2) == [[1], [3], [2], [0]]
    assert lean_attention._groups(sizes, 1 << 20) == [[1, 3, 2, 0]]


def test_only_much_ragged_work_is_done_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    width = HEADS * DIM
    rows, mask, plan = ragged(0, [(8, 12), (1, 2), (1, 3)], [0, 1, 2])
    cache = prepared(plan, 3, 0)
    choose = [rows, mask, cache, torch.float64, width]
    assert isinstance(attention_for(*choose), PaddedAttention)
    monkeypatch.setattr(lean_attention, "_CALL", width)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert isinstance(attention_for(*choose), GroupedAttention)
    even = torch.ones_like(mask)  # the rows' queries are the same too where nothing is padding
    assert isinstance(attention_for(Rows(rows.shape, None), even, cache, torch.float64, width), PaddedAttention)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert isinstance(attention_for(*choose), PaddedAttention)
    assert isinstance(attention_for(rows, mask.to("meta"), cache, torch.float64, width), PaddedAttention)


@pytest.mark.parametrize(("numbers", "expected"), [([3], slice(3, 4)), ([2, 3, 4], slice(2, 5)), ([2, 4, 3, 5], None)])
def test_indices_that_follow_one_another_copy_nothing(numbers: list[int], expected: slice | None) -> None:
    found = lean_attention._index(np.array(numbers))
    assert found == expected if expected is not None else found.tolist() == numbers
