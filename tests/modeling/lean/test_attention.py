from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged import DIM, HEADS, by_hand, prepared, ragged, states
from refusion_lit.modeling.lean import attention
from refusion_lit.modeling.lean.attention import GroupedAttention, PaddedAttention, attention_for
from refusion_lit.modeling.lean.rows import Rows

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
    table = attention._sizes(rows, mask)
    assert table.tolist() == [list(size) for size in sizes]
    groups = attention._groups(table.tolist(), call)
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
    assert attention._groups(sizes, 4 * 90 + 1) == [[1, 3], [2, 0]]
    assert attention._groups(sizes, 4 * 90) == [[1], [3], [2, 0]]
    assert attention._groups(sizes, 4 * 2) == [[1], [3], [2], [0]]
    assert attention._groups(sizes, 1 << 20) == [[1, 3, 2, 0]]


def test_only_much_ragged_work_is_done_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    width = HEADS * DIM
    rows, mask, plan = ragged(0, [(8, 12), (1, 2), (1, 3)], [0, 1, 2])
    cache = prepared(plan, 3, 0)
    choose = [rows, mask, cache, torch.float64, width]
    assert isinstance(attention_for(*choose), PaddedAttention)
    monkeypatch.setattr(attention, "_CALL", width)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert isinstance(attention_for(*choose), GroupedAttention)
    even = torch.ones_like(mask)  # the rows' queries are the same too where nothing is padding
    assert isinstance(attention_for(Rows(rows.shape, None), even, cache, torch.float64, width), PaddedAttention)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert isinstance(attention_for(*choose), PaddedAttention)
    assert isinstance(attention_for(rows, mask.to("meta"), cache, torch.float64, width), PaddedAttention)


@pytest.mark.parametrize(("numbers", "expected"), [([3], slice(3, 4)), ([2, 3, 4], slice(2, 5)), ([2, 4, 3, 5], None)])
def test_indices_that_follow_one_another_copy_nothing(numbers: list[int], expected: slice | None) -> None:
    found = attention._index(np.array(numbers))
    assert found == expected if expected is not None else found.tolist() == numbers
