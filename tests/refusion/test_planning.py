"""``ReFusion`` that plans the next round in a verification, and the layout of its infills: costs, never tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.decoding import RecomputeKV, ReFusion, decode
from refusion_lit.types import SamplingParams
from support.example_counts import examples
from support.fakes import EOS, VOCAB, HashModel, OracleModel, oracle_text
from support.refusion_cases import decoders, make_prompt


def accepts_all(text: list[int], accepted: list[int], shape: tuple[int, int], first: int) -> bool:
    """Return whether a verification accepted all its drafts and none of them is an EOS token.

    Args:
        text: The generated tokens.
        accepted: The accepted positions.
        shape: Sequences and tokens of the verification.
        first: Position of the first generated token.
    """
    accepted_tokens = [text[position - first] for position in accepted if position - first < len(text)]
    return len(accepted) == shape[1] and EOS not in accepted_tokens


@settings(max_examples=examples(72), deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 9999),
    num_new_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_planning_ahead_changes_no_token(
    data: st.DataObject, seed: int, num_new_tokens: int, temperature: float
) -> None:
    decoder = data.draw(decoders(num_new_tokens))
    prompt = make_prompt(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)))
    first = len(prompt.token_ids)
    ends = data.draw(st.frozensets(st.integers(first, first + num_new_tokens), max_size=2))
    bias = data.draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0]))
    sampling = SamplingParams(max_new_tokens=num_new_tokens, temperature=temperature)
    plain, fused = (
        decode(HashModel(seed, ends=ends, end_bias=bias), variant, [prompt], sampling, trace=True).rows[0]
        for variant in (decoder, replace(decoder, fused=True))
    )
    assert plain.token_ids == fused.token_ids
    if decoder.infill == "bonus":  # `fused` also decides which drafts there are
        return
    plain_phases = [entry.phase for entry in plain.trace]
    fused_phases = [entry.phase for entry in fused.trace]
    # Forward passes are saved only where a plan is part of another forward pass.
    num_saved = plain_phases.count("plan") - fused_phases.count("plan")
    assert len(plain_phases) - len(fused_phases) == num_saved >= 0
    other_plain_phases = [phase for phase in plain_phases if phase != "plan"]
    other_fused_phases = [phase.removesuffix("+plan") for phase in fused_phases if phase != "plan"]
    assert other_fused_phases == other_plain_phases
    # A plan is saved after every recomputation, and after every verification that accepted all its drafts.
    num_saved_at_least = 0
    for entry, next_phase in zip(plain.trace, plain_phases[1:], strict=False):
        if next_phase == "plan" and entry.phase == "recompute":
            num_saved_at_least += 1
        elif next_phase == "plan" and entry.phase == "verify" and entry.accepted:
            num_saved_at_least += accepts_all(plain.token_ids, entry.accepted, entry.shape, first)
    assert num_saved >= num_saved_at_least


@pytest.mark.parametrize("cls", [ReFusion, RecomputeKV])
def test_with_all_drafts_accepted_a_round_is_one_forward(cls: type[ReFusion]) -> None:
    model = OracleModel(oracle_text(None))
    decoder = cls(slot_size=4, num_serial_blocks=2, selection="top_k", k=2)
    [row] = decode(model, decoder, [make_prompt([5, 6])], SamplingParams(max_new_tokens=32), trace=True).rows
    assert [(entry.phase, entry.shape) for entry in row.trace] == [
        ("plan", (1, 2 + 16)),
        ("verify+plan", (1, 8 + 8)),
        ("verify+plan", (1, 8 + 16)),  # the next serial block
        ("verify+plan", (1, 8 + 8)),
        ("verify", (1, 8)),
    ]
    assert row.token_ids == [oracle_text(None)(place) for place in range(2, 34)]


def test_after_an_eos_token_among_the_drafts_only_slots_before_it_are_planned() -> None:
    # Slots 2 and 3 are certain, 2 holds the end: the next plan sees no draft after it and holds slots 0 and 1.
    sure = {2 + 8, 2 + 12}
    model = OracleModel(oracle_text(2 + 9), certainty=lambda place: 0.97 if place in sure else 0.5)
    decoder = ReFusion(slot_size=4, num_serial_blocks=1)
    [row] = decode(model, decoder, [make_prompt([5, 6])], SamplingParams(max_new_tokens=24), trace=True).rows
    assert [(entry.phase, entry.shape) for entry in row.trace] == [
        ("plan", (1, 2 + 24)),
        ("verify+plan", (1, 8 + 8)),
        ("verify+plan", (1, 4 + 4)),
        ("verify", (1, 4)),
    ]
    assert row.token_ids == [oracle_text(11)(place) for place in range(2, 12)]
    visible = model.calls[1].mask[0, 8:]
    assert not visible[:, 2 + 2 : 2 + 8].any(), "masks see nothing after the end"
    assert visible[:, : 2 + 2].all()


def test_recomputing_keys_and_values_after_an_infill_plans_in_the_same_forward_pass() -> None:
    model = OracleModel(oracle_text(None), certainty=lambda place: 0.9 - 0.01 * place, agreement=lambda _: 0.5)
    decoder = RecomputeKV(slot_size=2, num_serial_blocks=1, token_threshold=0.6)
    [row] = decode(model, decoder, [make_prompt([5])], SamplingParams(max_new_tokens=4), trace=True).rows
    phases = ["plan", "verify+plan", "infill_propose", "infill_verify", "recompute+plan"]
    phases += ["verify", "infill_propose", "infill_verify", "recompute"]
    assert [entry.phase for entry in row.trace] == phases


@settings(max_examples=examples(48), deadline=None)
@given(
    data=st.data(), seed=st.integers(0, 9999), num_new_tokens=st.integers(1, 40), fused=st.booleans(),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
)  # fmt: skip
def test_the_packed_layout_of_infills_gives_the_same_text_and_computes_at_most_as_many_positions(
    data: st.DataObject, seed: int, num_new_tokens: int, fused: bool, temperature: float
) -> None:
    decoder = replace(data.draw(decoders(num_new_tokens)), fused=fused)
    prompt = make_prompt(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)))
    first = len(prompt.token_ids)
    ends = data.draw(st.frozensets(st.integers(first, first + num_new_tokens), max_size=2))
    bias = data.draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0]))
    sampling = SamplingParams(max_new_tokens=num_new_tokens, temperature=temperature)
    reference, packed = (
        decode(HashModel(seed, ends=ends, end_bias=bias), replace(decoder, infill_layout=layout), [prompt], sampling)
        for layout in ("reference", "packed")
    )
    assert reference.rows[0].token_ids == packed.rows[0].token_ids
    assert reference.rows[0].num_forwards == packed.rows[0].num_forwards
    assert packed.num_positions <= reference.num_positions
