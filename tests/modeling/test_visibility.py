"""Visibility, which describes attention by ranges, against the matrix of query and key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.modeling.fused.attention import additive_mask
from refusion_lit.modeling.visibility import Span, Visibility, as_mask
from support.ragged import make_ragged
from support.shadow_device import SHADOW, ShadowDevice

SIZES = st.lists(
    st.integers(1, 9).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 14))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), sizes=SIZES)
def test_ranges_and_the_matrix_say_the_same(seed: int, sizes: list[tuple[int, int]]) -> None:
    made = make_ragged(seed, sizes, list(range(len(sizes))))
    visibility, expected = made.visibility, made.mask
    assert torch.equal(as_mask(visibility, torch.device("cpu")), expected)
    assert torch.equal(additive_mask(visibility, torch.float32)[:, 0].exp().bool(), expected)
    starts, stops = visibility.ranges()[..., None].unbind(-2)
    keys = torch.arange(visibility.num_keys)
    assert torch.equal(((starts <= keys) & (keys < stops)).any(-2), expected)
    size = 1 + seed % 4
    for start in range(0, visibility.shape[1], size):
        stop = min(start + size, visibility.shape[1])
        part = visibility.cut(start, stop)
        matrix = torch.zeros(*part.shape, visibility.num_keys, dtype=torch.bool)
        matrix[..., : part.num_keys] = additive_mask(part, torch.float32)[:, 0].exp().bool()
        real = torch.zeros(part.shape, dtype=torch.bool)
        for span in visibility.spans:
            real[span.sequence, max(span.offset - start, 0) : max(span.offset + span.length - start, 0)] = True
        assert torch.equal(matrix[real], expected[:, start:stop][real])
        assert matrix.any(-1).all(), "padding sees something"
    causal = torch.ones(visibility.shape[1], visibility.shape[1], dtype=torch.bool).tril()
    if visibility.is_causal:
        for span in visibility.spans:
            tokens = expected[span.sequence, : span.length]
            assert torch.equal(
                tokens[:, span.first_key : span.first_key + span.length], causal[: span.length, : span.length]
            )
            assert tokens.sum() == causal[: span.length, : span.length].sum()


def test_a_device_is_sent_ranges_and_makes_the_matrix_itself() -> None:
    made = make_ragged(3, [(4, 9), (7, 14)], [0, 1])
    with ShadowDevice() as device:
        mask = as_mask(made.visibility, SHADOW)
        assert device.num_waits == 0
    assert isinstance(mask, Tensor)
    assert mask.device == SHADOW
    assert torch.equal(mask.plain, made.mask)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("span", "is_causal"),
    [
        (Span(0, 0, 3, 0), True),
        (Span(0, 0, 3, 5, ((0, 0), (4, 4))), True),
        (Span(0, 0, 3, 5, ((0, 5),)), False),
        (Span(0, 0, 3, 0, (), [0, 0, 0]), False),
    ],
)
def test_a_prompt_is_causal_and_nothing_else_is(span: Span, is_causal: bool) -> None:
    assert Visibility([span], (1, 3), 8).is_causal is is_causal
    assert not Visibility([span, Span(0, 3, 1, 3)], (1, 4), 8).is_causal


def test_single_tokens_after_all_other_keys_need_no_matrix() -> None:
    last = [Span(row, 0, 1, 7, ((0, 7),)) for row in range(2)]
    assert Visibility(last, (2, 1), 8).sees_all_keys
    assert not Visibility(last, (2, 1), 9).sees_all_keys
    assert not Visibility([last[0], Span(1, 0, 1, 6, ((0, 6),))], (2, 1), 8).sees_all_keys
    assert not Visibility([Span(0, 0, 1, 7, ((1, 7),))], (1, 1), 8).sees_all_keys
    assert not Visibility([Span(0, 0, 2, 6, ((0, 6),))], (1, 2), 8).sees_all_keys
