"""The attention of the fused body against attention of single tokens, for padded batches over a KV cache."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.modeling.fused.attention import (
    Call,
    RowAttention,
    Rows,
    attend_rows,
    chunked_calls,
    padded_call,
    plan_attention,
)
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Span, Visibility, as_mask
from support.ragged import DIM, attend_slowly, draw_states, make_ragged, prepare_cache

SIZE = st.integers(1, 9).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 14)))
LIKE = torch.empty(0, dtype=torch.float64)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 9999),
    sizes=st.lists(SIZE, min_size=1, max_size=6),
    max_mask=st.integers(1, 300),
    spare=st.integers(0, 2),
)
def test_chunks_and_padded_rows_attend_as_each_token_does_alone(
    seed: int, sizes: list[tuple[int, int]], max_mask: int, spare: int
) -> None:
    num_rows = len(sizes) + spare
    storage = random.Random(seed).sample(range(num_rows), len(sizes))
    made = make_ragged(seed, sizes, storage)
    query, key, value = draw_states(seed, len(made.plan["row_index"]))
    for kind in ("chunks", "ranges", "matrix"):
        cache = prepare_cache(made.plan, num_rows, seed)
        visible = made.mask if kind == "matrix" else made.visibility
        calls = chunked_calls(made.visibility, torch.float64, max_mask) if kind == "chunks" else []
        attend = RowAttention(made.rows, calls or [padded_call(made.rows, visible, cache, LIKE)], cache)
        actual = attend(0, query, key, value)
        torch.testing.assert_close(actual, attend_slowly(made.rows, made.mask, cache, query, key, value))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 9999),
    times=st.sampled_from([1, 2, 3, 8]),
    num_queries=st.integers(1, 20),
    kind=st.sampled_from(["causal", "everything", "mask"]),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_heads_that_share_keys_attend_as_each_does_alone(
    seed: int, times: int, num_queries: int, kind: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_keys = num_queries if kind == "causal" else num_queries + seed % 5
    query, key, value = (
        torch.randn(2, length, heads, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for length, heads in ((num_queries, 2 * times), (num_keys, 2), (num_keys, 2))
    )
    visible = torch.rand(2, 1, num_queries, num_keys, generator=generator) < 0.6
    visible[..., 0] = True
    if kind != "mask":
        visible = torch.ones_like(visible)
    if kind == "causal":
        visible = visible.tril()
    added = torch.where(visible, 0.0, -torch.inf).to(dtype)
    actual = attend_rows(query, key, value, added if kind == "mask" else None, is_causal=kind == "causal")
    key, value = (states.double().repeat_interleave(times, 2) for states in (key, value))
    scores = torch.einsum("rqhd,rkhd->rhqk", query.double(), key) / DIM**0.5 + added.double()
    expected = torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), value)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-9, rtol=0)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 9999), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), max_mask=st.integers(1, 99)
)
def test_tokens_attend_to_each_other_without_a_cache(seed: int, lengths: list[int], max_mask: int) -> None:
    chance, longest = random.Random(seed), max(lengths)
    spans = [
        Span(row, 0, n, 0, (), chance.choice([None, [0] * n, [i // 2 for i in range(n)]]))
        for row, n in enumerate(lengths)
    ]
    visibility = Visibility(spans, (len(lengths), longest), longest)
    rows = Rows(torch.Size((len(lengths), longest)), None)
    query, key, value = draw_states(seed, len(lengths) * longest)

    def attend(calls: list[Call]) -> Tensor:
        return RowAttention(rows, calls, None)(0, query, key, value)

    expected = attend([padded_call(rows, as_mask(visibility, LIKE.device), None, LIKE)])
    calls = chunked_calls(visibility, torch.float64, max_mask)
    for outputs in (attend([padded_call(rows, visibility, None, LIKE)]), attend(calls)):
        for row, n in enumerate(lengths):
            span = slice(row * longest, row * longest + n)
            torch.testing.assert_close(outputs[span], expected[span])


@pytest.mark.parametrize("order", [None, [0] * 3000, [i // 300 for i in range(3000)], [i // 7 for i in range(3000)]])
def test_masks_of_long_rows_are_small_and_not_kept(order: list[int] | None) -> None:
    cache = KVCache(1, 1)
    cache.prepare([0], 5000, None, torch.zeros(3000, dtype=torch.long), torch.arange(2000, 5000))
    span = Span(0, 0, 3000, 2000, ((0, 2000),), order)
    visibility = Visibility([span], (1, 3000), 5000)
    rows = Rows(torch.Size((1, 3000)), None)
    calls = plan_attention(rows, visibility, cache, torch.empty(0))._calls
    assert len(calls) > 1
    assert not any(isinstance(call.mask, Tensor) for call in calls)
    assert all(call.mask().numel() <= 1 << 22 for call in calls if callable(call.mask))
    prompt = Visibility([Span(0, 0, 3000, 2000, (), None)], (1, 3000), 5000)
    (call,) = plan_attention(rows, prompt, cache, torch.empty(0))._calls
    assert call.is_causal
    assert call.mask is None
    few = Visibility([Span(0, 0, 30, 2000, ((0, 2000),), None)], (1, 30), 2030)
    assert len(plan_attention(Rows(torch.Size((1, 30)), None), few, None, torch.empty(0))._calls) == 1
