"""Fast-dLLM against plain loops from its specification, with caches as frozen keys and values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.test_llada import PROMPTS, cut, logits, model, plain_llada, run
from refusion_lit.decoding import FastDLLM, LLaDA, decode
from refusion_lit.types import Prompt, SamplingParams


def plain_threshold(prompt: tuple[int, ...], length: int, block: int, threshold: float) -> tuple[list[int], int]:
    canvas: list[int | None] = [None] * length
    forwards = 0
    for start in range(0, length, block):
        places = range(start, min(start + block, length))
        while any(canvas[p] is None for p in places):
            values, allowed = logits([*prompt, *[2 if c is None else c for c in canvas]])
            forwards += 1
            found = []
            for place in places:
                if canvas[place] is None:
                    token = int(allowed[len(prompt) + place].argmax())
                    found.append((float(values[len(prompt) + place].softmax(-1)[token]), place, token))
            best = max(found, key=lambda f: (f[0], -f[1]))
            for confidence, place, token in found:
                if confidence >= threshold or place == best[1]:
                    canvas[place] = token
    return [c for c in canvas if c is not None], forwards


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 0.9, 2.0])
@pytest.mark.parametrize(("length", "block"), [(12, 12), (12, 4), (10, 4)])
def test_a_plain_loop_gives_the_same(length: int, block: int, threshold: float) -> None:
    decoder = FastDLLM(block_length=block, threshold=threshold)
    for prompt, row in zip(PROMPTS, run(decoder, length), strict=True):
        tokens, forwards = plain_threshold(prompt, length, block, threshold)
        assert row.token_ids == cut(tokens)
        assert row.num_forwards == forwards


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a_threshold_above_one_uncovers_one_token_a_forward(cache: str) -> None:
    for row in run(FastDLLM(block_length=4, threshold=1.1, cache=cache), 12):
        assert row.num_forwards == 12


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_an_endless_factor_uncovers_a_block_at_once(cache: str) -> None:
    for row in run(FastDLLM(block_length=4, threshold=None, factor=1e9, cache=cache), 12):
        assert row.num_forwards == 3


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_blocks_of_one_token_are_refreshed_every_step_and_need_no_cache(cache: str) -> None:
    cached, plain = (run(FastDLLM(block_length=1, cache=c), 10) for c in (cache, "none"))
    assert [(r.token_ids, r.forward_shapes) for r in cached] == [(r.token_ids, r.forward_shapes) for r in plain]


@pytest.mark.parametrize(("cache", "lengths"), [("prefix", [20, 12, 12, 12, 20, 8, 8, 8]), ("dual", [20, 4, 4, 4] * 2)])
def test_what_a_cache_saves(cache: str, lengths: list[int]) -> None:
    prompt = PROMPTS[0][:8]
    (row,) = run(FastDLLM(block_length=4, threshold=1.1, cache=cache), 12, [prompt])
    shapes = row.forward_shapes
    assert [length for _, length in shapes[:8]] == lengths


@given(
    confidences=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    factor=st.floats(0, 5),
)
@settings(max_examples=200)
def test_the_factor_rule_is_the_papers(confidences: list[float], factor: float) -> None:
    decoder = FastDLLM(threshold=None, factor=factor, block_length=16)
    state = decoder.begin(Prompt(token_ids=(3,), id="0"), SamplingParams(max_new_tokens=16), model().special_tokens)
    chosen = decoder._choose(state, confidences, 16)
    ranked = sorted(confidences, reverse=True)
    expected = 1
    for n in range(2, len(ranked) + 1):  # the largest n with c_j >= 1 - f / (j + 1) for all j from 2 to n
        if all(ranked[j - 1] >= 1 - factor / (j + 1) for j in range(2, n + 1)):
            expected = n
    assert len(chosen) == expected
    assert sorted((confidences[i] for i in chosen), reverse=True) == ranked[:expected]


def test_shared_out_steps_are_llada() -> None:
    fast = run(FastDLLM(block_length=6, threshold=None, steps=4), 12)
    slow = run(LLaDA(block_length=6, steps=4), 12)
    assert [(r.token_ids, r.num_forwards) for r in fast] == [(r.token_ids, r.num_forwards) for r in slow]
    assert fast[0].token_ids == cut(plain_llada(PROMPTS[0], 12, 4, 6))


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("shifted", [False, True])
def test_rows_do_not_depend_on_the_batch(cache: str, shifted: bool) -> None:
    decoder = FastDLLM(block_length=8, threshold=0.4, cache=cache, shifted=shifted)
    alone, together = run(decoder, 20), run(decoder, 20, batch_size=3)
    assert [(r.token_ids, r.forward_shapes) for r in alone] == [(r.token_ids, r.forward_shapes) for r in together]
    assert {r.finish_reason for r in alone} <= {"eos", "length"}


def test_with_a_cache_a_shifted_block_begins_with_its_first_token_alone() -> None:
    decoder = FastDLLM(block_length=6, threshold=0.0, cache="dual", shifted=True)
    prompts = [Prompt(token_ids=PROMPTS[0], id="0")]
    row = decode(model(), decoder, prompts, SamplingParams(max_new_tokens=12), trace=True).rows[0]
    start = len(PROMPTS[0])
    assert [r.accepted for r in row.trace] == [
        [start], [*range(start + 1, start + 6)], [start + 6], [*range(start + 7, start + 12)]
    ]  # fmt: skip


def test_stopping_at_the_end_gives_the_same_text() -> None:
    for block in (4, 32):
        full = run(FastDLLM(block_length=block), 32)
        stopped = run(FastDLLM(block_length=block, stop_at_eos=True), 32)
        assert [r.token_ids for r in full] == [r.token_ids for r in stopped]
        assert sum(r.num_forwards for r in stopped) <= sum(r.num_forwards for r in full)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": 0}, "block_length"),
        ({"factor": 1.0}, "factor: expected null with a threshold"),
        ({"steps": 4}, "steps: expected null with a threshold"),
        ({"threshold": None, "steps": 1, "block_length": 4}, "steps: expected at least one for each of the 3 blocks"),
        ({"threshold": -0.1}, "threshold"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(FastDLLM(**options), 12)
