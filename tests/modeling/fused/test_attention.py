from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragged import DIM, HEADS, by_hand, prepared, ragged, states
from refusion_lit.modeling.fused import segments
from refusion_lit.modeling.fused.attention import PaddedAttention, Rows, attend_rows
from refusion_lit.modeling.fused.segments import SegmentedAttention, attention_for, segmented
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.spans import Span
from refusion_lit.modeling.visibility import Visibility

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
            attend: Any = PaddedAttention(made.rows, made.mask if kind == "matrix" else made.visibility, cache, LIKE)
            if kind == "segments":
                attend = segmented(made.rows, made.visibility, cache, torch.float64, call) or attend
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
    expected = PaddedAttention(rows, visibility.mask(), None, LIKE)(0, query, key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_ALONE", 1)
        attend = segmented(rows, visibility, None, torch.float64, call)
    padded = PaddedAttention(rows, visibility, None, LIKE)(0, query, key, value)
    for found in [padded] if attend is None else [padded, attend(0, query, key, value)]:
        for row, n in enumerate(lengths):
            own = slice(row * longest, row * longest + n)
            torch.testing.assert_close(found[own], expected[own])


def test_a_long_span_gets_calls_of_its_own_and_all_others_share_one() -> None:
    lengths = (3, 40, 2)
    visibility = Visibility([Span(row, 0, n, 0, (), None) for row, n in enumerate(lengths)], (3, 40), 40)
    rows = Rows(torch.Size((3, 40)), None)
    attend = segmented(rows, visibility, None, torch.float64, 40 * 40 // segments._ALONE)
    assert attend is not None
    assert [(each.num_queries, each.is_causal) for each in attend._segments] == [(40, True), (3, False)]
    assert segmented(rows, visibility, None, torch.float64, 40 * 40 // segments._ALONE + 1) is None


def test_only_much_work_is_cut_into_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    width = HEADS * DIM
    made = ragged(0, [(8, 12), (1, 2), (1, 3)], [0, 1, 2])
    choose: list[Any] = [made.rows, made.visibility, prepared(made.plan, 3, 0), LIKE, width]
    assert isinstance(attention_for(*choose), PaddedAttention)
    monkeypatch.setattr(segments, "_CALL", width)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert isinstance(attention_for(*choose), SegmentedAttention)
    elsewhere = attention_for(*choose[:3], LIKE.to("meta"), width)
    assert isinstance(elsewhere, PaddedAttention)
    assert isinstance(attention_for(made.rows, made.mask, *choose[2:]), PaddedAttention)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert isinstance(attention_for(*choose), PaddedAttention)


def masks_of(attend: SegmentedAttention) -> list[Tensor]:
    return [segment.mask for segment in attend._segments if segment.mask is not None]


def bytes_held(masks: list[Tensor]) -> int:
    return sum({mask.untyped_storage().data_ptr(): mask.untyped_storage().nbytes() for mask in masks}.values())


@pytest.mark.parametrize("order", [None, [0] * 3000, [i // 300 for i in range(3000)], [i // 7 for i in range(3000)]])
def test_masks_grow_with_the_keys_not_with_their_square(order: list[int] | None) -> None:
    rows, cache = Rows(torch.Size((1, 3000)), None), KVCache(1, 1)
    cache.prepare([0], 5000, None, torch.zeros(3000, dtype=torch.long), torch.arange(2000, 5000))
    span = Span(0, 0, 3000, 2000, ((0, 2000),), order)
    visibility = Visibility([span], (1, 3000), 5000)
    attend = segmented(rows, visibility, cache, torch.float32, 0)
    assert attend is not None
    assert bytes_held(masks_of(attend)) <= 3 * 64 * 5000 * 4
    if order is not None and order[-1] < 100:
        assert masks_of(attend) == []
    prompt = Visibility([Span(0, 0, 3000, 2000, (), None)], (1, 3000), 5000)
    attend = segmented(rows, prompt, cache, torch.float32, 0)
    assert attend is not None
    assert masks_of(attend) == []
    assert len(attend._segments) == 1


@pytest.mark.parametrize(("numbers", "expected"), [([3], slice(3, 4)), ([2, 3, 4], slice(2, 5)), ([2, 4, 3, 5], None)])
def test_indices_that_follow_one_another_copy_nothing(numbers: list[int], expected: slice | None) -> None:
    found = segments._index(np.array(numbers))
    assert found == expected if expected is not None else found.tolist() == numbers
