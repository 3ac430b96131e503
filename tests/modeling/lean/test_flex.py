from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from meeting_points import MeetingPoints
from ragged import by_hand, prepared, ragged, states
from refusion_lit.modeling.fused import flex
from refusion_lit.modeling.fused.attention import attention_for
from refusion_lit.modeling.fused.flex import FlexAttention

SIZE = st.integers(1, 9).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 14)))


@settings(max_examples=20)
@given(seed=st.integers(0, 9999), sizes=st.lists(SIZE, min_size=1, max_size=6), spare=st.integers(0, 2))
def test_packed_rows_attend_as_each_token_does_alone(seed: int, sizes: list[tuple[int, int]], spare: int) -> None:
    num_rows = len(sizes) + spare
    storage = random.Random(seed).sample(range(num_rows), len(sizes))
    made = ragged(seed, sizes, storage)
    query, key, value = states(seed, len(made.plan["row_index"]))
    cache = prepared(made.plan, num_rows, seed)
    like = torch.empty(0, dtype=torch.float64)
    attend = attention_for(made.rows, made.visibility, cache, like, 1, "flex_attention")
    assert isinstance(attend, FlexAttention)
    found = attend(0, query, key, value)
    torch.testing.assert_close(found, by_hand(made.rows, made.mask, cache, query, key, value))


@settings(max_examples=20)
@given(seed=st.integers(0, 9999), block=st.sampled_from([2, 4, 128]))
def test_blocks_are_those_that_some_query_sees_something_of(seed: int, block: int) -> None:
    chance = random.Random(seed)
    num_rows, capacity, num_tokens = chance.randint(1, 4), 8, chance.randint(1, 20)
    owner = torch.tensor([chance.randrange(num_rows) for _ in range(num_tokens)])
    ranges = torch.randint(0, capacity + 1, (num_tokens, 2, 2), generator=torch.Generator().manual_seed(seed))
    starts, stops = ranges.unbind(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_BLOCK", block)
        count, index = flex._blocks(owner, starts, stops, num_rows, capacity)
    size = min(block, capacity)
    for number in range(-(-num_tokens // block)):
        expected = {
            (int(owner[token]) * capacity + entry) // size
            for token in range(number * block, min((number + 1) * block, num_tokens))
            for start, stop in ranges[token].tolist()
            for entry in range(start, stop)
        }
        assert set(index[number, : count[number]].tolist()) == expected
        assert sorted(index[number].tolist()) == list(range(num_rows * capacity // size))
    assert count.dtype == index.dtype == torch.int32


def test_neither_mask_nor_storage_is_looked_at_by_the_host() -> None:
    made = ragged(0, [(3, 9), (1, 4)], [1, 0])
    cache, mask = prepared(made.plan, 3, 0), made.mask
    with MeetingPoints() as points:
        attend = FlexAttention(made.rows, made.visibility, cache, torch.device("cpu"))
    assert points.found == []
    with MeetingPoints() as points:  # it does see what it looks for
        _ = mask[mask].tolist(), mask.nonzero(), mask.sum().item()
    assert sorted(points.found) == ["_local_scalar_dense", "index", "nonzero"]
    assert attend._mask.q_indices is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_it_is_the_same_and_compiled_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as they were traced: what torch 2.13 makes of them for CPUs does not compile for all shapes."""
    compiled = torch.compile(flex_attention, backend="eager")
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    monkeypatch.setattr(flex, "_flex", lambda query, key, value, mask: compiled(
        query, key, value, block_mask=mask, enable_gqa=True
    ))  # fmt: skip
    chance, numbers = random.Random(1), set()
    for seed in range(24):
        sizes = [(queries := chance.randint(1, 90), chance.randint(queries, 200)) for _ in range(chance.randint(1, 5))]
        made = ragged(seed, sizes, chance.sample(range(6), len(sizes)))
        numbers.add((made.visibility.ranges().shape[2] - 1).bit_length())
        query, key, value = states(seed, len(made.plan["row_index"]))
        cache = prepared(made.plan, 6, seed)
        with torch.no_grad():
            attend = FlexAttention(made.rows, made.visibility, cache, torch.device("cpu"))
            found = attend(0, query, key, value)
        expected = by_hand(made.rows, made.mask, cache, query, key, value)
        torch.testing.assert_close(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_graphs <= 2 * len(numbers) + 2
