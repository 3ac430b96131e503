"""Fast-dLLM against plain loops from its specification, with caches as frozen keys and values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.decoding import FastDLLM, LLaDA
from refusion_lit.engine.requests import Reading
from support.example_counts import examples
from support.reference_masked import EOS, PROMPTS, by_factor, by_quota, by_threshold, fast_dllm, run, unmask
from support.slow_decoding import cut

CACHES = ("none", "prefix", "dual")
each_cache = pytest.mark.parametrize("cache", CACHES)


def check(decoder: FastDLLM, length: int, rule: Any, prompts: list[tuple[int, ...]] = PROMPTS) -> None:
    """Compare the text and the length of every forward pass with a plain loop.

    Args:
        decoder: The decoder.
        length: Number of new tokens.
        rule: Chooses in the plain loop the places to unmask; the decoder's options must mean the same rule.
        prompts: The prompts.
    """
    for prompt, row in zip(prompts, run(decoder, length, prompts), strict=True):
        tokens, lengths = fast_dllm(
            prompt, length, decoder.block_length, rule, kept=decoder.cache, shift=int(decoder.shifted)
        )
        assert row.token_ids == cut(tokens, [EOS])
        assert row.forward_shapes == [(1, size) for size in lengths]


@each_cache
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("length", "block", "threshold"),
    [
        pytest.param(12, 12, 0.3, id="one block"),
        pytest.param(12, 12, 2.0, id="one block, nothing above the threshold"),
        pytest.param(18, 5, 0.0, id="blocks with a shorter last block, everything above the threshold"),
        pytest.param(18, 5, 0.6, id="blocks with a shorter last block"),
    ],
)
def test_a_plain_loop_gives_the_same(length: int, block: int, threshold: float, shifted: bool, cache: Any) -> None:
    decoder = FastDLLM(block_length=block, threshold=threshold, shifted=shifted, cache=cache)
    check(decoder, length, by_threshold(threshold), PROMPTS[:2])


@each_cache
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.5])
def test_a_plain_loop_with_a_factor_gives_the_same(factor: float, cache: Any) -> None:
    check(FastDLLM(block_length=8, threshold=None, factor=factor, cache=cache), 20, by_factor(factor), PROMPTS[:1])


@each_cache
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("per_block", [2, 5, 9])
def test_a_plain_loop_with_steps_gives_the_same(per_block: int, shifted: bool, cache: Any) -> None:
    decoder = FastDLLM(block_length=7, threshold=None, steps=per_block * 3, shifted=shifted, cache=cache)
    rule = by_quota(per_block, alone=int(shifted and cache != "none"))
    # The blocks have 7, 7 and 2 tokens.
    check(decoder, 16, rule, PROMPTS[1:2])
    (row,) = run(decoder, 16, PROMPTS[:1])
    assert row.num_forwards == 2 * min(per_block, 7) + min(per_block, 2)


@each_cache
def test_a_prompt_may_contain_the_mask_id(cache: Any) -> None:
    prompts = [(3, 2, 4, 2), (2,)]
    check(FastDLLM(block_length=3, threshold=0.5, cache=cache), 8, by_threshold(0.5), prompts)


def test_the_caches_are_approximate() -> None:
    """Otherwise the comparisons above would not tell them apart."""
    none, prefix, dual = (
        [row.token_ids for row in run(FastDLLM(block_length=20, cache=cache), 40, PROMPTS[:2])] for cache in CACHES
    )
    assert none != prefix
    assert none != dual
    assert prefix != dual


@each_cache
def test_a_threshold_above_one_unmasks_one_token_a_forward(cache: Any) -> None:
    for row in run(FastDLLM(block_length=4, threshold=1.1, cache=cache), 12):
        assert row.num_forwards == 12


@each_cache
def test_a_huge_factor_unmasks_a_block_at_once(cache: Any) -> None:
    for row in run(FastDLLM(block_length=4, threshold=None, factor=1e9, cache=cache), 12):
        assert row.num_forwards == 3


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_blocks_of_one_token_are_refreshed_every_step_and_need_no_cache(cache: Any) -> None:
    cached, plain = (run(FastDLLM(block_length=1, cache=c), 10) for c in (cache, "none"))
    assert [(r.token_ids, r.forward_shapes) for r in cached] == [(r.token_ids, r.forward_shapes) for r in plain]


@pytest.mark.parametrize(("cache", "lengths"), [("prefix", [20, 12, 12, 12, 20, 8, 8, 8]), ("dual", [20, 4, 4, 4] * 2)])
def test_a_cache_shortens_all_forward_passes_of_a_block_but_the_first(cache: Any, lengths: list[int]) -> None:
    """The prompt has 8 tokens, and 3 blocks of 4 masks follow.

    The first forward pass of a block computes all 20 tokens. Later forward passes compute the block and the masks after
    it with ``prefix``, and the block with ``dual``. ``lengths`` are the tokens of the forward passes of two blocks.
    """
    prompt = PROMPTS[0][:8]
    (row,) = run(FastDLLM(block_length=4, threshold=1.1, cache=cache), 12, [prompt])
    shapes = row.forward_shapes
    assert [length for _, length in shapes[:8]] == lengths


def choose_places(decoder: FastDLLM, confidences: list[float]) -> list[int]:
    """Return the places that a decoder unmasks, given the model's confidence at each place."""
    return unmask(decoder, Reading(tokens=[3] * len(confidences), probabilities=confidences))


@given(
    confidences=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    factor=st.floats(0, 5),
)
@settings(max_examples=examples(72))
def test_the_factor_rule_is_the_papers(confidences: list[float], factor: float) -> None:
    decoder = FastDLLM(threshold=None, factor=factor, block_length=16)
    chosen = choose_places(decoder, confidences)
    ranked = sorted(confidences, reverse=True)
    expected = 1
    for n in range(2, len(ranked) + 1):  # the largest n with c_j >= 1 - f / (j + 1) for all j from 2 to n
        if all(ranked[j - 1] >= 1 - factor / (j + 1) for j in range(2, n + 1)):
            expected = n
    assert len(chosen) == expected
    assert sorted((confidences[i] for i in chosen), reverse=True) == ranked[:expected]


def test_a_number_of_steps_without_a_cache_gives_the_text_of_llada() -> None:
    fast = run(FastDLLM(block_length=6, threshold=None, steps=4), 12)
    slow = run(LLaDA(block_length=6, steps=4), 12)
    assert [(r.token_ids, r.num_forwards) for r in fast] == [(r.token_ids, r.num_forwards) for r in slow]


def test_a_confidence_equal_to_the_threshold_is_enough() -> None:
    assert len(choose_places(FastDLLM(threshold=0.75), [0.5, 0.75, 0.875, 0.75])) == 3


@given(
    confidences=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    bounds=st.lists(st.floats(0, 5), min_size=2, max_size=2).map(sorted),
)
def test_more_is_unmasked_with_a_larger_factor_and_a_smaller_threshold(
    confidences: list[float], bounds: list[float]
) -> None:
    low, high = bounds
    fewer, more = (FastDLLM(threshold=None, factor=factor) for factor in (low, high))
    assert 1 <= len(choose_places(fewer, confidences)) <= len(choose_places(more, confidences))
    fewer, more = (FastDLLM(threshold=threshold / 5) for threshold in (high, low))
    assert 1 <= len(choose_places(fewer, confidences)) <= len(choose_places(more, confidences))


@each_cache
@pytest.mark.parametrize("shifted", [False, True])
def test_rows_do_not_depend_on_the_batch(cache: Any, shifted: bool) -> None:
    decoder = FastDLLM(block_length=8, threshold=0.4, cache=cache, shifted=shifted)
    alone, together = run(decoder, 20), run(decoder, 20, batch_size=3)
    assert [(r.token_ids, r.forward_shapes) for r in alone] == [(r.token_ids, r.forward_shapes) for r in together]
    assert {r.finish_reason for r in alone} <= {"eos", "length"}


def test_with_a_cache_a_shifted_block_begins_with_its_first_token_alone() -> None:
    decoder = FastDLLM(block_length=6, threshold=0.0, cache="dual", shifted=True)
    (row,) = run(decoder, 12, PROMPTS[:1], trace=True)
    start = len(PROMPTS[0])
    assert [r.accepted for r in row.trace] == [
        [start], [*range(start + 1, start + 6)], [start + 6], [*range(start + 7, start + 12)]
    ]  # fmt: skip


@each_cache
def test_stopping_at_an_eos_token_gives_the_same_text_in_fewer_forward_passes(cache: Any) -> None:
    full_rows, stopped_rows = (
        run(FastDLLM(block_length=8, cache=cache, stop_at_eos=stops), 64, PROMPTS[:2]) for stops in (False, True)
    )
    for full, stopped in zip(full_rows, stopped_rows, strict=True):
        assert full.token_ids == stopped.token_ids
        assert full.finish_reason == "eos"
        assert stopped.num_forwards < full.num_forwards


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": 0}, "block_length"),
        ({"factor": 1.0}, "factor: expected null with a threshold"),
        ({"steps": 4}, "steps: expected null with a threshold"),
        ({"threshold": None, "steps": 4, "block_length": 4}, "steps: expected a multiple of the 3 blocks"),
        (
            {"threshold": None, "steps": 3, "block_length": 4, "shifted": True, "cache": "dual"},
            "steps: expected at least 6",
        ),
        ({"cache": "Prefix"}, "cache: expected one of none, prefix, dual"),
        ({"threshold": -0.1}, "threshold"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(FastDLLM(**options), 12)
