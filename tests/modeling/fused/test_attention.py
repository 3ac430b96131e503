from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.modeling.fused import segments
from refusion_lit.modeling.fused.attention import Call, RowAttention, Rows, attend_rows, padded_call
from refusion_lit.modeling.fused.segments import attention_for, segmented
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Span, Visibility, as_mask
from support.ragged import DIM, HEADS, by_hand, prepared, ragged, states

SIZE = st.integers(1, 9).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 14)))
LIKE = torch.empty(0, dtype=torch.float64)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 9999),
    sizes=st.lists(SIZE, min_size=1, max_size=6),
    call=st.integers(0, 80),
    alone=st.integers(0, 2),
    chunk=st.integers(1, 5),
    spare=st.integers(0, 2),
)
def test_segments_and_padded_rows_attend_as_each_token_does_alone(
    seed: int, sizes: list[tuple[int, int]], call: int, alone: int, chunk: int, spare: int
) -> None:
    num_rows = len(sizes) + spare
    storage = random.Random(seed).sample(range(num_rows), len(sizes))
    made = ragged(seed, sizes, storage)
    query, key, value = states(seed, len(made.plan["row_index"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_ALONE", alone)
        patch.setattr(segments, "_CHUNK", chunk)
        for kind in ("segments", "ranges", "matrix"):
            cache = prepared(made.plan, num_rows, seed)
            seen = made.mask if kind == "matrix" else made.visibility
            calls = segmented(made.visibility, cache, torch.float64, call) if kind == "segments" else []
            attend = RowAttention(made.rows, calls or [padded_call(made.rows, seen, cache, LIKE)], cache)
            found = attend(0, query, key, value)
            torch.testing.assert_close(found, by_hand(made.rows, made.mask, cache, query, key, value))


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
    seen = torch.rand(2, 1, num_queries, num_keys, generator=generator) < 0.6
    seen[..., 0] = True
    if kind != "mask":
        seen = torch.ones_like(seen)
    if kind == "causal":
        seen = seen.tril()
    added = torch.where(seen, 0.0, -torch.inf).to(dtype)
    found = attend_rows(query, key, value, added if kind == "mask" else None, is_causal=kind == "causal")
    key, value = (states.double().repeat_interleave(times, 2) for states in (key, value))
    scores = torch.einsum("rqhd,rkhd->rhqk", query.double(), key) / DIM**0.5 + added.double()
    expected = torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), value)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-9, rtol=0)


@settings(max_examples=40)
@given(seed=st.integers(0, 9999), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), call=st.integers(0, 30))
def test_tokens_attend_to_each_other_without_a_cache(seed: int, lengths: list[int], call: int) -> None:
    chance, longest = random.Random(seed), max(lengths)
    spans = [
        Span(row, 0, n, 0, (), chance.choice([None, [0] * n, [i // 2 for i in range(n)]]))
        for row, n in enumerate(lengths)
    ]
    visibility, rows = (
        Visibility(spans, (len(lengths), longest), longest),
        Rows(torch.Size((len(lengths), longest)), None),
    )
    query, key, value = states(seed, len(lengths) * longest)

    def attended(calls: list[Call]) -> Tensor:
        return RowAttention(rows, calls, None)(0, query, key, value)

    expected = attended([padded_call(rows, as_mask(visibility, LIKE.device), None, LIKE)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_ALONE", 1)
        calls = segmented(visibility, None, torch.float64, call)
    padded = attended([padded_call(rows, visibility, None, LIKE)])
    for found in [padded, attended(calls)] if calls else [padded]:
        for row, n in enumerate(lengths):
            own = slice(row * longest, row * longest + n)
            torch.testing.assert_close(found[own], expected[own])


def test_a_long_span_gets_calls_of_its_own_and_all_others_share_one() -> None:
    lengths = (3, 40, 2)
    visibility = Visibility([Span(row, 0, n, 0, (), None) for row, n in enumerate(lengths)], (3, 40), 40)
    calls = segmented(visibility, None, torch.float64, 40 * 40 // segments._ALONE)
    assert [(each.places, each.is_causal) for each in calls] == [(slice(0, 40), True), (slice(0, 3), False)]
    assert segmented(visibility, None, torch.float64, 40 * 40 // segments._ALONE + 1) == []


def test_only_much_work_is_cut_into_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    width = HEADS * DIM
    made = ragged(0, [(8, 12), (1, 2), (1, 3)], [0, 1, 2])
    choose: list[Any] = [made.rows, made.visibility, prepared(made.plan, 3, 0), LIKE, width]

    def is_cut(*choose: Any) -> bool:
        return len(attention_for(*choose)._calls) > 1

    assert not is_cut(*choose)
    monkeypatch.setattr(segments, "_CALL", width)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert is_cut(*choose)
    assert not is_cut(*choose[:3], LIKE.to("meta"), width)
    assert not is_cut(made.rows, made.mask, *choose[2:])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert not is_cut(*choose)


def masks_of(calls: list[Call]) -> list[Tensor]:
    return [call.mask for call in calls if call.mask is not None]


def bytes_held(masks: list[Tensor]) -> int:
    return sum({mask.untyped_storage().data_ptr(): mask.untyped_storage().nbytes() for mask in masks}.values())


@pytest.mark.parametrize("order", [None, [0] * 3000, [i // 300 for i in range(3000)], [i // 7 for i in range(3000)]])
def test_masks_grow_with_the_keys_not_with_their_square(order: list[int] | None) -> None:
    cache = KVCache(1, 1)
    cache.prepare([0], 5000, None, torch.zeros(3000, dtype=torch.long), torch.arange(2000, 5000))
    span = Span(0, 0, 3000, 2000, ((0, 2000),), order)
    visibility = Visibility([span], (1, 3000), 5000)
    calls = segmented(visibility, cache, torch.float32, 0)
    assert calls
    assert bytes_held(masks_of(calls)) <= 3 * 64 * 5000 * 4
    if order is not None and order[-1] < 100:
        assert masks_of(calls) == []
    prompt = Visibility([Span(0, 0, 3000, 2000, (), None)], (1, 3000), 5000)
    calls = segmented(prompt, cache, torch.float32, 0)
    assert masks_of(calls) == []
    assert len(calls) == 1


@pytest.mark.parametrize(("numbers", "expected"), [([3], slice(3, 4)), ([2, 3, 4], slice(2, 5)), ([2, 4, 3, 5], None)])
def test_indices_that_follow_one_another_copy_nothing(numbers: list[int], expected: slice | None) -> None:
    found = segments._index(np.array(numbers))
    assert found == expected if expected is not None else found.tolist() == numbers
