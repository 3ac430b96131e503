"""LLaDA gives the reference outputs and keeps the invariants of its specification; Dream's orders keep theirs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.decoding import Generation, GenerationCallback, LLaDA, ModelMismatchError, RowState, decode
from refusion_lit.families.llada.decoder import most_certain, step_quota
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.fakes import tiny_backbone
from support.reference_masked import EOS, PROMPTS, REFERENCE, draw, dream, forward, llada, make_input, model, run
from support.slow_decoding import cut

ORDERS = ("low_confidence", "random", "origin", "maskgit_plus", "topk_margin", "entropy")


class Canvases(GenerationCallback):
    """Keeps each prompt's whole canvas, also what follows an end of sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def on_commit(self, index: int, state: RowState) -> None:
        masked = zip(state.tokens, state.is_masked, strict=True)
        self.tokens[index] = [-1 if is_masked else token for token, is_masked in masked]


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("setting", range(5))
def test_text_and_forwards_are_the_reference_ones(setting: int, batch_size: int) -> None:
    options = dict(REFERENCE["settings"][setting])
    length = options.pop("gen_length")
    decoder = LLaDA(
        steps=options["steps"],
        block_length=options["block_length"],
        guidance_scale=options.get("cfg_scale", 0.0),
    )
    runs = [run for run in REFERENCE["runs"] if run["setting"] == setting]
    if batch_size == 1:  # one prompt is enough
        runs = runs[:1]
    prompts = [Prompt(token_ids=tuple(r["prompt"]), id=str(i)) for i, r in enumerate(runs)]
    sampling = SamplingParams(max_new_tokens=length)
    canvases = Canvases()
    output = decode(model("float32"), decoder, prompts, sampling, batch_size=batch_size, callbacks=[canvases])
    for i, (reference, row) in enumerate(zip(runs, output.rows, strict=True)):
        assert canvases.tokens[i] == reference["output"]
        assert row.token_ids == cut(reference["output"], [EOS])
        assert row.num_forwards == reference["num_forwards"]
        assert row.forward_shapes[0][0] == (2 if "cfg_scale" in options else 1)


@pytest.mark.parametrize(("length", "steps", "block"), [(12, 12, 12), (12, 4, 6), (12, 9, 4), (8, 16, 8)])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_plain_loop_gives_the_same(length: int, steps: int, block: int, shift: int) -> None:
    decoder = LLaDA(steps=steps, block_length=block, shifted=bool(shift))
    for prompt, row in zip(PROMPTS[:2], run(decoder, length, PROMPTS[:2]), strict=True):
        assert row.token_ids == cut(llada(prompt, length, steps, block, shift=shift), [EOS])
        assert row.num_forwards == steps


@pytest.mark.parametrize(
    "options", [{"eos": "forbid"}, {"eos": "zero"}, {"guidance": 0.7}, {"guidance": 2.0, "eos": "zero"}]
)
def test_a_plain_loop_with_guidance_and_ends_gives_the_same(options: dict[str, Any]) -> None:
    decoder = LLaDA(
        steps=8,
        block_length=12,
        guidance_scale=options.get("guidance", 0.0),
        forbid_eos=options.get("eos") == "forbid",
        eos_confidence_zero=options.get("eos") == "zero",
    )
    for prompt, row in zip(PROMPTS[:3], run(decoder, 48, PROMPTS[:3]), strict=True):
        assert row.token_ids == cut(llada(prompt, 48, 8, 12, **options), [EOS])


@pytest.mark.parametrize("order", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize(("length", "steps"), [(12, 12), (16, 5), (6, 11)])
def test_a_plain_loop_of_dreams_gives_the_same(order: str, length: int, steps: int) -> None:
    rows = run(LLaDA(steps=steps, order=order, shifted=True), length, PROMPTS[:2])
    for prompt, row in zip(PROMPTS[:2], rows, strict=True):
        assert row.token_ids == cut(dream(prompt, length, steps, order), [EOS])
        assert row.num_forwards == steps


def test_a_prompt_may_contain_the_mask_id() -> None:
    prompt = (3, 2, 4, 2)
    for guidance in (0.0, 1.0):
        (row,) = run(LLaDA(steps=6, guidance_scale=guidance), 6, [prompt])
        assert row.token_ids == cut(llada(prompt, 6, 6, 6, guidance=guidance), [EOS])


def test_ties_go_to_the_lower_place() -> None:
    assert most_certain([0.5, 0.9, 0.5, 0.9, 0.5], 4) == [1, 3, 0, 2]


@given(num_masks=st.integers(1, 200), num_steps=st.integers(1, 300))
def test_quotas_sum_to_the_block_and_differ_by_one_at_most(num_masks: int, num_steps: int) -> None:
    quotas = [step_quota(num_masks, num_steps, step) for step in range(num_steps)]
    assert sum(quotas) == num_masks
    assert quotas == sorted(quotas, reverse=True)
    assert quotas[0] - quotas[-1] <= 1


@pytest.mark.parametrize("order", ["low_confidence", "random"])
def test_each_step_unmasks_its_quota_of_its_block(order: str) -> None:
    row, *_ = run(LLaDA(steps=6, block_length=5, order=order), 10, PROMPTS[:1], trace=True)
    start = len(PROMPTS[0])
    assert [len(entry.accepted) for entry in row.trace] == [2, 2, 1] * 2
    assert sorted(place for entry in row.trace[:3] for place in entry.accepted) == [*range(start, start + 5)]
    (single,) = run(LLaDA(order=order), 9, PROMPTS[:1], trace=True)
    assert [len(entry.accepted) for entry in single.trace] == [1] * 9
    (trailing,) = run(LLaDA(steps=6, order=order), 4, PROMPTS[:1], trace=True)
    assert [len(entry.accepted) for entry in trailing.trace] == [1, 1, 1, 1, 0, 0]


def decode_many(decoder: LLaDA, length: int, num: int) -> list[Generation]:
    """Decode one prompt under many names, whose chances are independent."""
    prompts = [Prompt(token_ids=PROMPTS[0], id=str(i)) for i in range(num)]
    return decode(model(), decoder, prompts, SamplingParams(max_new_tokens=length), batch_size=100, trace=True).rows


def test_a_random_order_prefers_no_place() -> None:
    firsts = Counter(row.trace[0].accepted[0] for row in decode_many(LLaDA(order="random", steps=4), 4, 400))
    assert all(firsts[len(PROMPTS[0]) + place] == pytest.approx(100, abs=30) for place in range(4))


@pytest.mark.parametrize(  # without chance, batches are compared with the authors' texts in tests/goldens
    ("order", "temperature"), [*((order, 0.7) for order in ORDERS), ("random", 0.0), ("origin", 0.0)]
)
def test_rows_do_not_depend_on_the_batch(order: str, temperature: float) -> None:
    decoder = LLaDA(steps=8, order=order)
    alone = run(decoder, 16, temperature=temperature, seed=3)
    together = run(decoder, 16, temperature=temperature, seed=3, batch_size=4)
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert {r.num_forwards for r in alone} == {8}
    assert {r.finish_reason for r in alone} <= {"eos", "length"}


def test_origin_unmasks_linearly_in_time() -> None:
    rows = decode_many(LLaDA(steps=10, order="origin"), 20, 40)
    for step in (2, 5, 8):
        done = sum(len(r.accepted) for row in rows for r in row.trace[:step]) / (40 * 20)
        assert done == pytest.approx(step / 10, abs=0.06)
    assert all(sum(len(r.accepted) for r in row.trace) == 20 for row in rows)


def test_a_shifted_model_is_read_one_position_earlier() -> None:
    prompt = PROMPTS[0]
    (row,) = run(LLaDA(steps=1, shifted=True), 6, [prompt], trace=True)
    values, _ = forward(make_input(prompt, [None] * 6))
    first = len(prompt)
    assert row.trace[0].positions == [*range(first, first + 6)]
    assert row.trace[0].tokens == [draw(values[place - 1]) for place in range(first, first + 6)]


def test_options_about_the_end_of_sequence() -> None:
    (full,) = run(LLaDA(block_length=16), 64, PROMPTS[:1])
    assert full.finish_reason == "eos"
    (stopped,) = run(LLaDA(block_length=16, stop_at_eos=True), 64, PROMPTS[:1])
    assert stopped.token_ids == full.token_ids
    assert full.num_forwards == 64
    assert stopped.num_forwards < 64
    (forbidden,) = run(LLaDA(steps=16, forbid_eos=True), 64, PROMPTS[:1])
    assert EOS not in forbidden.token_ids
    assert len(forbidden.token_ids) == 64


def test_an_end_of_sequence_without_confidence_comes_last() -> None:
    (row,) = run(LLaDA(eos_confidence_zero=True), 64, PROMPTS[:1], trace=True)
    for entry in row.trace:
        drawn = dict(zip(entry.positions, entry.tokens, strict=True))
        certainty = dict(zip(entry.positions, entry.probabilities, strict=True))
        assert all(certainty[p] == 0.0 for p, token in drawn.items() if token == EOS)
        (accepted,) = entry.accepted
        assert certainty[accepted] == max(certainty.values())


def test_no_guidance_is_weight_zero() -> None:
    # l_u + (0 + 1)(l_c - l_u) is l_c up to rounding; a tiny weight must give the same text from two branches.
    plain, guided = run(LLaDA(steps=8), 16), run(LLaDA(steps=8, guidance_scale=1e-9), 16)
    assert [r.token_ids for r in plain] == [r.token_ids for r in guided]
    assert guided[0].forward_shapes[0] == (2, len(PROMPTS[0]) + 16)


@pytest.mark.parametrize(
    ("options", "length", "message"),
    [
        ({"block_length": 7}, 16, "block_length: expected a divisor of max_new_tokens"),
        ({"block_length": 4, "steps": 6}, 16, "steps: expected a multiple of the 4 blocks"),
        ({"steps": 0}, 16, "steps: expected"),
        ({"order": "entropy", "block_length": 4}, 16, "block_length: expected null with order 'entropy'"),
        ({"guidance_scale": -1.0}, 16, "guidance_scale"),
        ({"guidance_scale": float("inf")}, 16, "guidance_scale"),
        ({"order": "confidence"}, 16, "order: expected one of low_confidence, random"),
        ({"order": "entropy", "eos_confidence_zero": True}, 16, "eos_confidence_zero: expected false with order"),
    ],
)
def test_impossible_options(options: dict[str, Any], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(LLaDA(**options), length)


def test_models_trained_otherwise_are_refused() -> None:
    masked, shifted = (ModelTraits(attention="bidirectional", predictions=(p,)) for p in ("mask", "mask_shifted"))
    assert not LLaDA().requirements().mismatches(masked)
    assert not LLaDA(shifted=True).requirements().mismatches(shifted)
    assert "predictions mask," in LLaDA().requirements().mismatches(shifted)[0]
    assert "predictions mask_shifted," in LLaDA(shifted=True).requirements().mismatches(masked)[0]
    with pytest.raises(ModelMismatchError, match=r"bidirectional attention, .*causal"):
        decode(tiny_backbone(), LLaDA(), [Prompt(token_ids=(3,), id="0")], SamplingParams(max_new_tokens=2))
