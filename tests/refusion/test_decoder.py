"""``ReFusion`` and ``RecomputeKV`` against slow references: tokens, and what is computed for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.decoding import RecomputeKV, ReFusion, decode
from refusion_lit.types import Prompt, SamplingParams
from support.example_counts import examples
from support.fakes import EOS, MASK, VOCAB, HashModel, OracleModel, oracle_text, tiny_backbone
from support.reference_refusion import SlowReFusion
from support.refusion_cases import decoders, make_prompt


@settings(max_examples=examples(90), deadline=None)
@given(data=st.data(), seed=st.integers(0, 9999), num_new_tokens=st.integers(1, 30))
def test_greedy_decoding_is_the_slow_reference(data: st.DataObject, seed: int, num_new_tokens: int) -> None:
    decoder = data.draw(decoders(num_new_tokens))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
    model = HashModel(
        seed,
        flavour=data.draw(st.sampled_from(["plain", "plain", "ties"])),
        ends=data.draw(st.frozensets(st.integers(len(prompt), len(prompt) + num_new_tokens), max_size=2)),
        end_bias=data.draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0])),
    )
    reference = SlowReFusion(model, decoder, tuple(prompt), num_new_tokens).run()
    [row] = decode(model, decoder, [make_prompt(prompt)], SamplingParams(max_new_tokens=num_new_tokens)).rows
    assert row.token_ids == reference.response
    if decoder.infill != "bonus":  # with bonus tokens, slots of several stages share a forward pass
        assert row.forward_shapes == reference.shapes


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data(), num_new_tokens=st.integers(1, 20))
def test_a_transformer_with_a_kv_cache_equals_the_slow_reference_without(
    data: st.DataObject, num_new_tokens: int
) -> None:
    decoder = data.draw(decoders(num_new_tokens))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    model = tiny_backbone()
    with torch.no_grad():
        reference = SlowReFusion(model, decoder, tuple(prompt), num_new_tokens).run()
    [row] = decode(model, decoder, [make_prompt(prompt)], SamplingParams(max_new_tokens=num_new_tokens)).rows
    assert row.token_ids == reference.response
    if decoder.infill != "bonus":  # with bonus tokens, slots of several stages share a forward pass
        assert row.forward_shapes == reference.shapes
    ahead = replace(decoder, fused=True, infill_layout="packed")
    [row] = decode(model, ahead, [make_prompt(prompt)], SamplingParams(max_new_tokens=num_new_tokens)).rows
    assert row.token_ids == reference.response


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), seed=st.integers(0, 9999), num_new_tokens=st.integers(1, 30), fused=st.booleans())
def test_with_bonus_tokens_every_forward_commits_a_token(
    data: st.DataObject, seed: int, num_new_tokens: int, fused: bool
) -> None:
    drawn = data.draw(decoders(num_new_tokens).filter(lambda it: type(it) is ReFusion))
    num_drafts = data.draw(st.none() | st.integers(1, 4))
    decoder = replace(drawn, infill="bonus", token_threshold=0.5, num_drafts=num_drafts)
    model = HashModel(seed, end_bias=data.draw(st.sampled_from([-30.0, -4.0])))
    sampling = SamplingParams(max_new_tokens=num_new_tokens)
    reference = SlowReFusion(model, decoder, (3, 4), num_new_tokens).run()
    [row] = decode(model, replace(decoder, fused=fused), [make_prompt([3, 4])], sampling, trace=True).rows
    assert row.token_ids == reference.response
    assert row.num_forwards <= len(reference.text)


def test_fused_decoding_plans_in_the_forward_pass_of_a_verification_that_accepts_all() -> None:
    model = OracleModel(oracle_text(None))
    sampling = SamplingParams(max_new_tokens=16)
    phases = {}
    for fused in (False, True):
        decoder = ReFusion(slot_size=4, num_serial_blocks=2, infill="bonus", selection="sequential", fused=fused)
        [row] = decode(model, decoder, [make_prompt([5, 6])], sampling, trace=True).rows
        assert row.token_ids == [oracle_text(None)(place) for place in range(2, 18)]
        phases[fused] = [step.phase for step in row.trace]
    assert phases[False] == ["plan", "verify"] * 4
    assert "verify+plan" in phases[True]
    assert len(phases[True]) < 8


def test_fused_decoding_gives_the_same_text_where_an_earlier_eos_token_makes_a_plan_useless() -> None:
    sampling = SamplingParams(max_new_tokens=25)
    decoder = ReFusion(slot_size=3, infill="bonus", token_threshold=0.5, selection="top_k", k=2)
    for seed in range(100):  # for 13 seeds an open slot ends the text before a slot that had already ended it
        model = HashModel(seed, ends=frozenset({7, 8, 11, 12, 14}))
        model.forward_cost = 1e6  # so expensive that the decoder fuses plans wherever it can
        texts = [
            decode(model, replace(decoder, fused=fused), [make_prompt([3, 4])], sampling).rows[0].token_ids
            for fused in (False, True)
        ]
        assert texts[0] == texts[1]


def make_certainty(prompt_length: int, slot_size: int, wrong: set[int]) -> Callable[[int], float]:
    """Return, by position, how sure a mask is of the right token: hardly at the slots' ``wrong`` offsets."""
    return lambda position: 1e-6 if (position - prompt_length) % slot_size in wrong else 0.97


def test_where_a_draft_is_rejected_masks_draft_the_rest_in_the_same_forward() -> None:
    model = OracleModel(oracle_text(None), certainty=make_certainty(2, 8, {2}))
    model.forward_cost = 1e6  # one forward saved is worth any number of masks
    decoder = ReFusion(slot_size=8, num_serial_blocks=2, infill="bonus", num_drafts=2)
    [row] = decode(model, decoder, [make_prompt([5, 6])], SamplingParams(max_new_tokens=16)).rows
    assert row.token_ids == [oracle_text(None)(place) for place in range(2, 18)]
    # After the plan, a slot takes three forward passes: draft 1 is accepted and the model's own token 2 is added; then
    # drafts 3 and 4 and the model's own token 5; then drafts 6 and 7, beside the plan of the next slot.
    assert row.num_forwards == 1 + 3 + 3


def test_the_models_choices_after_a_rejected_draft_are_the_next_drafts() -> None:
    # Masks are always wrong here. An oracle does not depend on its input: its choices after a wrong draft are right.
    model = OracleModel(oracle_text(None), certainty=make_certainty(2, 64, set(range(1, 64))))
    decoder = ReFusion(slot_size=64, num_serial_blocks=1, infill="bonus", num_drafts=3)
    [row] = decode(model, decoder, [make_prompt([5, 6])], SamplingParams(max_new_tokens=64), trace=True).rows
    assert row.token_ids == [oracle_text(None)(place) for place in range(2, 66)]
    assert row.num_forwards < 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"infill": "bonus", "token_threshold": 0.4}, "^token_threshold: expected at least 0.5 with infill 'bonus'"),
        ({"num_drafts": 3}, "^num_drafts: expected null without infill 'bonus', got 3"),
        ({"infill": "bonus", "num_drafts": 0}, "^num_drafts: expected an integer of at least 1, got 0"),
    ],
)
def test_options_of_bonus_tokens_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReFusion(**options)


def test_the_fake_models_reach_open_slots_and_differences_between_the_two_decoders() -> None:
    """Otherwise the comparisons above would compare too little."""
    num_open, num_differing = 0, 0
    for seed in range(40):
        model = HashModel(seed, ends=frozenset({9 + seed % 12}), end_bias=-4.0)
        options = {"slot_size": 4, "num_serial_blocks": 1, "slot_threshold": 0.3, "token_threshold": 0.6}
        texts = []
        for decoder in (ReFusion(**options), RecomputeKV(**options)):
            reference = SlowReFusion(model, decoder, (3, 4, 5), 24).run()
            num_open += reference.num_infills_before_open_slots
            texts.append(reference.response)
        num_differing += texts[0] != texts[1]
    assert num_open > 10
    assert num_differing > 10


def test_slots_before_an_eos_token_found_by_an_infill_are_still_decoded() -> None:
    # Slots 1 and 3 are certain, but no draft passes; slot 1 holds the end, slots 0 and 2 are still open.
    sure = {3 + 4, 3 + 12}
    model = OracleModel(
        oracle_text(3 + 6), certainty=lambda place: 0.97 if place in sure else 0.5, agreement=lambda _: 0.5
    )
    decoder = ReFusion(fused=False, infill_layout="reference", slot_size=4, num_serial_blocks=1)
    [row] = decode(model, decoder, [make_prompt([5, MASK, EOS])], SamplingParams(max_new_tokens=16), trace=True).rows
    assert row.token_ids == [oracle_text(9)(place) for place in range(3, 10)]
    # Of the two certain slots: the plan of all four, the verification, and two rounds of infilling (drafts, then their
    # verification) that each leave one token fewer. Slot 0 takes three rounds.
    certain_slots = [(1, 3 + 16), (1, 8), (2, 4), (2, 4), (2, 3), (2, 3)]
    slot_0 = [(1, 4), (1, 4), (1, 4), (1, 4), (1, 3), (1, 3), (1, 2), (1, 2)]
    assert row.forward_shapes == certain_slots + slot_0
    assert row.trace[5].accepted == [7, 8, 9]
    assert row.trace[-1].accepted == [3, 4, 5, 6]
    assert row.finish_reason == "eos"


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 6])
def test_nothing_is_decoded_after_an_eos_token_that_a_verification_accepts(num_blocks: int) -> None:
    model = OracleModel(oracle_text(2 + 5))
    decoder = ReFusion(fused=False, slot_size=4, num_serial_blocks=num_blocks)
    [row] = decode(model, decoder, [make_prompt([5, 6])], SamplingParams(max_new_tokens=24)).rows
    assert row.token_ids == [oracle_text(7)(place) for place in range(2, 8)]
    length = 24 // num_blocks  # of a serial block
    if length == 4:  # the EOS token is in the second block
        assert row.forward_shapes == [(1, 2 + 4), (1, 4), (1, 4), (1, 4)]
    else:
        assert row.forward_shapes == [(1, 2 + length), (1, length)]


def test_slots_beyond_the_budget_cost_no_further_forward_pass() -> None:
    # 9 tokens are three slots, one in each serial block: each block is planned and verified.
    model = OracleModel(oracle_text(None))
    decoder = ReFusion(fused=False, slot_size=4, num_serial_blocks=3)
    [row] = decode(model, decoder, [make_prompt([5])], SamplingParams(max_new_tokens=9)).rows
    assert row.num_tokens == 9
    assert row.forward_shapes == [(1, 1 + 4), (1, 4), (1, 4), (1, 4), (1, 4), (1, 4)]
    # 11 tokens are three slots, too, in serial blocks of two: the fourth slot is decoded together with the third.
    decoder = ReFusion(fused=False, slot_size=4, num_serial_blocks=2)
    [row] = decode(model, decoder, [make_prompt([5])], SamplingParams(max_new_tokens=11)).rows
    assert row.num_tokens == 11
    assert row.forward_shapes == [(1, 1 + 8), (1, 8), (1, 8), (1, 8)]


@pytest.mark.parametrize("certainty", ["first", "mean", "min", "product"])
def test_logits_are_computed_only_where_the_decoder_reads_them(certainty: Any) -> None:
    """Six slots of four tokens, of which slots 1, 2 and 4 begin with a certain token."""
    sure = {4 * slot for slot in (1, 2, 4)}
    model = OracleModel(oracle_text(None), certainty=lambda place: 0.97 if place - 2 in sure else 0.5)
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, slot_threshold=0.6, slot_confidence=certainty, fused=False)
    decode(model, decoder, [make_prompt([5, 6])], SamplingParams(max_new_tokens=24), trace=True)
    # Slots that are left in each round, and slots that the round chooses.
    if certainty in ("first", "mean"):  # the mean (0.97 + 3 * 0.5) / 4 is just above 0.6, too
        rounds = [(6, 3), (3, 1), (2, 1), (1, 1)]
    else:  # no slot is certain: one slot a round
        rounds = [(num_left, 1) for num_left in range(6, 0, -1)]
    num_read = 0
    for num_left, num_chosen in rounds:
        # The plan reads the first token of all slots and the drafts of the chosen slots, or all tokens of all slots.
        num_read += num_left + num_chosen * 3 if certainty == "first" else num_left * 4
        num_read += num_chosen * 3  # the verification scores the drafts
    assert model.num_logit_rows == num_read
    assert len(model.calls) == 2 * len(rounds)


def test_a_serial_block_beyond_the_budget_is_never_fed() -> None:
    # 10 tokens are five slots of two tokens, two slots per serial block: the fourth block would begin after the budget.
    model = OracleModel(oracle_text(None))
    prompt = Prompt(token_ids=(3, 4), id="p")
    [row] = decode(model, ReFusion(slot_size=2, num_serial_blocks=4), [prompt], SamplingParams(max_new_tokens=10)).rows
    assert row.num_tokens == 10
    assert max(place for call in model.calls for place, _ in call.fed) == 2 + 12 - 1
