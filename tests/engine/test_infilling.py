"""Templates: how given tokens of a response enter the forward passes of every family, and their cost.

A pattern such as ``ab__c.`` is a template: letters are given tokens of the oracle's text, underscores are holes, and a
full stop is an EOS token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from refusion_lit.constraints.templates import choose_lengths, choose_most_probable, make_probe
from refusion_lit.contrib import D2F, SlotSearch
from refusion_lit.decoding import (
    BlockDiffusion,
    Decoder,
    FastDLLM,
    FirstHitting,
    Generation,
    LLaDA,
    ReFusion,
    TokenEditing,
    WeDLM,
    decode,
)
from refusion_lit.engine.decoder import max_length
from refusion_lit.engine.output import TraceRound
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import traits_for
from support.fakes import EOS, MASK, HashModel, OracleModel, oracle_text, tiny_backbone

TEXT = oracle_text(None)
PROMPT = (3, 4)


def make_template(pattern: str, *, start: int = len(PROMPT)) -> tuple[int | None, ...]:
    """Return the template of a pattern whose first place has position ``start``; ``None`` is a hole."""
    return tuple({"_": None, ".": EOS}.get(c, TEXT(start + i)) for i, c in enumerate(pattern))


def run(decoder: Decoder, pattern: str, *, max_new_tokens: int = 16) -> tuple[Generation, OracleModel]:
    """Fill a template; check that the oracle's text comes out; return the response and the model with its calls."""
    model = OracleModel(TEXT, certainty=lambda place: 0.95 - 1e-6 * place, traits=traits_for(decoder))
    prompt = Prompt(token_ids=PROMPT, id="p", given=make_template(pattern))
    [row] = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=max_new_tokens), trace=True).rows
    length = len(row.token_ids) - pattern.endswith(".")
    assert row.token_ids[:length] == [TEXT(len(PROMPT) + i) for i in range(length)]
    return row, model


def test_refusion_feeds_given_tokens_after_the_prompt_and_before_the_masks() -> None:
    row, model = run(ReFusion(slot_size=2, num_serial_blocks=1), "ab___c_.")
    first = model.calls[0]
    assert first.position_ids[0].tolist() == [0, 1, 2, 3, 7, 9, 4, 5, 6, 8]
    assert (first.input_ids[0] == MASK).tolist() == [False] * 6 + [True] * 4
    assert first.mask[0].tolist() == torch.ones(10, 10).tril().bool().tolist()
    # Slots of two and of one token in the first hole, of one in the second: planned once, verified once.
    assert row.forward_shapes == [(1, 10), (1, 4)]


def test_refusion_fills_holes_before_the_rest() -> None:
    row, _ = run(ReFusion(slot_size=4, num_serial_blocks=2), "__a____b", max_new_tokens=12)
    places = [[position - len(PROMPT) for position in entry.accepted] for entry in row.trace if entry.accepted]
    assert places == [[0, 1], [3, 4, 5, 6], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert row.num_tokens == 12


@pytest.mark.parametrize("layout", ["reference", "packed"])
@pytest.mark.parametrize("fill", ["mask", "autoregressive"])
def test_slots_of_unequal_length_are_filled_in_parallel(layout: str, fill: str) -> None:
    if fill == "autoregressive" and layout != "reference":
        return
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, infill_layout=layout, infill=fill)
    model = OracleModel(TEXT, agreement=lambda _: 0.5, traits=traits_for(decoder))
    prompt = Prompt(token_ids=PROMPT, id="p", given=make_template("a____b___c__."))
    [row] = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=16)).rows
    assert row.token_ids[:-1] == [TEXT(len(PROMPT) + i) for i in range(12)]
    if layout == "reference" and fill == "mask":
        # The slot of four decides: three rounds of two forwards after plan and verification.
        assert row.num_forwards == 2 + 6


def test_given_tokens_are_computed_as_in_a_causal_text_without_the_holes() -> None:
    """The first draft of the decoder equals the prediction of masks that follow all known tokens."""
    decoder = ReFusion(slot_size=2)
    model = tiny_backbone(traits_for(decoder))
    text = [*PROMPT, *make_template("ab__c")]
    known = [(token, position) for position, token in enumerate(text) if token is not None]
    tokens, positions = (torch.tensor([values]) for values in zip(*known, strict=True))
    with torch.no_grad():
        expected = model.logits(model.hidden_states(tokens, positions, causal(5))[0])
    masked = [*known, (MASK, 4), (MASK, 5)]
    tokens, positions = (torch.tensor([values]) for values in zip(*masked, strict=True))
    with torch.no_grad():
        hidden = model.hidden_states(tokens, positions, causal(7))[0]
    assert torch.allclose(model.logits(hidden)[:5], expected)
    drafted = model.logits(hidden)[5:].clone()
    drafted[:, [0, 1, 2]] = -torch.inf
    [row] = decode(
        model, decoder, [Prompt(token_ids=PROMPT, id="p", given=make_template("ab__c"))],
        SamplingParams(max_new_tokens=2), trace=True,
    ).rows  # fmt: skip
    assert row.trace[0].tokens[0] == int(drafted[0, :14].argmax())


def causal(size: int) -> Tensor:
    return torch.ones(1, size, size).tril().bool()


@pytest.mark.parametrize(
    ("pattern", "options", "forwards"),
    [
        pytest.param("____aaaa____.", {"block_length": 4}, 8, id="a block without masks takes no step"),
        pytest.param("_aa__aa_.", {"block_length": 4}, 4, id="a step for each mask"),
        pytest.param("_aa__aa_.", {"block_length": 4, "steps": 8}, 2, id="half the steps, two masks per step"),
        pytest.param("______aaaaaa.", {"steps": 4}, 2, id="half the masks take half the steps"),
        pytest.param("aaaa____", {"steps": 16, "block_length": None}, 16, id="without an end, all steps"),
    ],
)
def test_llada_takes_steps_only_for_masks(pattern: str, options: dict[str, int], forwards: int) -> None:
    row, _ = run(LLaDA(**options), pattern)
    assert row.num_forwards == forwards


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("shifted", [False, True])
def test_fast_dllm_skips_given_blocks(cache: str, shifted: bool) -> None:
    decoder = FastDLLM(block_length=4, threshold=0.5, cache=cache, shifted=shifted)
    row, _ = run(decoder, "____aaaa" + "a___" + "aaaa" + ".")
    # The first token of the first block is unmasked in a step of its own if a shifted model has a cache.
    assert row.num_forwards == (3 if shifted and cache != "none" else 2)


def test_block_diffusion_fixes_tokens_of_its_blocks() -> None:
    decoder = BlockDiffusion(block_size=4, threshold=0.5)
    row, _ = run(decoder, "aa" + "aaaa" + "a_a_")
    assert row.num_forwards == 5, "none for blocks that are given"
    reason = decoder.refusal(Prompt(token_ids=PROMPT, id="p", given=make_template("a__a")))
    assert reason is not None
    assert "blocks of 4" in reason
    at_start = Prompt(token_ids=PROMPT, id="p", given=make_template("aa_a"))
    assert decoder.refusal(at_start) is None
    assert replace(decoder, shifted=True).refusal(at_start) is not None, "the block before predicts a first token"
    assert D2F(block_size=4).refusal(Prompt(token_ids=PROMPT, id="p", given=make_template("a__a"))) is None
    assert D2F(block_size=4).refusal(Prompt(token_ids=PROMPT, id="p", given=make_template("a__aa"))) is not None
    assert decoder.refusal(Prompt(token_ids=PROMPT, id="p", given=make_template("aaaaaaa"))) is None


def test_wedlm_sees_given_tokens_within_its_window() -> None:
    prompts = [Prompt(token_ids=PROMPT, id="p", given=make_template("_" * n + "a")) for n in (3, 4)]
    assert WeDLM(window_size=4).refusal(prompts[0]) is None
    assert "window of 4" in str(WeDLM(window_size=4).refusal(prompts[1]))
    _, model = run(WeDLM(window_size=4), "___a____")
    fed_before_masks = model.calls[0].position_ids[0].tolist()[: len(PROMPT) + 1]
    assert len(PROMPT) + 3 in fed_before_masks, "the given token is fed after the prompt"


@pytest.mark.parametrize(
    "decoder",
    [ReFusion(slot_size=3), SlotSearch(slot_size=3), LLaDA(), FastDLLM(), WeDLM(), D2F(), TokenEditing(),
     BlockDiffusion()],
    ids=lambda decoder: type(decoder).__name__,
)  # fmt: skip
def test_a_model_that_always_wants_to_end_fills_holes_and_ends_after_them(decoder: Decoder) -> None:
    model = HashModel(3, end_bias=500.0, traits=traits_for(decoder))
    prompts = [Prompt(token_ids=PROMPT, id="p", given=(None, None, 7, None, 9)), Prompt(token_ids=PROMPT, id="q")]
    first, second = decode(model, decoder, prompts, SamplingParams(max_new_tokens=16), batch_size=2).rows
    assert (len(first.token_ids), first.token_ids[2], first.token_ids[4], first.token_ids[5]) == (6, 7, 9, EOS)
    assert first.token_ids.index(EOS) == 5
    assert second.token_ids == [EOS]
    assert (first.num_tokens, first.num_given) == (4, 2)


def test_a_decoder_without_support_for_templates_refuses_them() -> None:
    class Newcomer(LLaDA):
        refuses = Decoder.refuses

    with pytest.raises(ValueError, match=r"^decoder: Newcomer cannot keep .*Decoder\.refusal"):
        run(Newcomer(), "a_a")
    row, _ = run(Newcomer(), "__")
    assert row.num_tokens == 16


@pytest.mark.parametrize("cls", [D2F, FirstHitting, LLaDA, ReFusion, SlotSearch, TokenEditing])
def test_a_template_without_holes_takes_no_forward_pass(cls: type[Decoder]) -> None:
    row, model = run(cls(), "abc.")
    assert (row.num_forwards, row.num_tokens, row.finish_reason) == (0, 0, "eos")
    assert not model.calls


def make_generation(
    pattern: str, tokens: list[int], probabilities: list[float], forwards: int
) -> tuple[Prompt, Generation]:
    """Return a prompt with a template, and a response as a decoder would return it.

    Args:
        pattern: The template.
        tokens: The tokens in the holes.
        probabilities: Their probabilities in the second draft, which counts; in the first they are 0.01.
        forwards: Number of forward passes.
    """
    prompt = Prompt(token_ids=PROMPT, id="p", given=make_template(pattern))
    filled, drafts = [*prompt.given], iter(tokens)
    places = [place for place, token in enumerate(filled) if token is None]
    for place in places:
        filled[place] = next(drafts)
    positions = [len(PROMPT) + place for place in places]
    trace = [
        TraceRound(phase="plan", shape=(1, 3), positions=positions, tokens=tokens, probabilities=values)
        for values in ([0.01] * len(tokens), probabilities)
    ]
    row = Generation(id="p", token_ids=filled, num_forwards=forwards, num_positions=10, trace=trace)  # type: ignore[arg-type]
    return prompt, row


def test_a_probe_hides_the_given_token_after_each_hole_but_no_eos_token() -> None:
    """The model's probability of that token tells how well the text in the hole leads on to it."""
    prompt, row = make_generation("a__bc_d_.", [5, 6, 7, 8], [0.5] * 4, 1)
    expected = [*row.token_ids]
    expected[3] = expected[6] = None  # type: ignore[call-overload]
    assert make_probe(prompt, row, [EOS]).given == tuple(expected)
    prompt, row = make_generation("__ab", [5, 6], [0.5] * 2, 1)
    row.token_ids += [4, 4, EOS]
    assert make_probe(prompt, row, [EOS]).given == (5, 6, None, row.token_ids[3])


@pytest.mark.parametrize("decoder", [ReFusion(), LLaDA(block_length=4)], ids=lambda decoder: type(decoder).__name__)
def test_prompts_that_fill_the_cache_with_several_lengths_are_decoded_to_the_end(decoder: Decoder) -> None:
    model = HashModel(3, traits=traits_for(decoder))
    prompts = [Prompt(token_ids=PROMPT, id="p", given=(None,) * n + (7,)) for n in range(1, 5)]
    lengths = []

    def decode_all(tried: Sequence[Prompt], sampling: SamplingParams) -> list[Generation]:
        lengths.append({max_length(prompt, sampling, model.special_tokens) for prompt in tried})
        return decode(model, decoder, tried, sampling, trace=True, max_cache_tokens=len(PROMPT) + 1 + 8).rows

    [row] = choose_lengths(decode_all, [prompts], SamplingParams(max_new_tokens=8), [EOS])
    assert 7 in row.token_ids
    assert lengths == [{8 + 1}] * 2


def test_the_length_that_fits_wins_and_pays_for_all() -> None:
    """A hole of unknown length is decoded with several lengths; the response counts the forward passes of all."""
    samples = [make_generation("_a.", [5], [0.9], 2), make_generation("__a.", [5, 6], [0.9, 0.5], 3)]
    (prompts, rows) = zip(*samples, strict=True)
    probes = [make_probe(prompt, row, [EOS]) for prompt, row in samples]

    def seams(first: tuple[int, float], second: tuple[int, float]) -> list[Generation]:
        """Return the probes' drafts of the token after the hole: token and probability for each template."""
        pairs = zip(prompts, (first, second), strict=True)
        traces = [TraceRound(phase="plan", shape=(1, 2), positions=[len(PROMPT) + prompt.given_length - 2],
                             tokens=[token], probabilities=[p]) for prompt, (token, p) in pairs]  # fmt: skip
        return [Generation(id="p", num_forwards=1, trace=[entry]) for entry in traces]

    right = [rows[0].token_ids[1], rows[1].token_ids[2]]
    # Both drafts at the seam are right, so that the tokens in the hole decide. Then the first draft is wrong.
    best = choose_most_probable(prompts, rows, probes, seams((right[0], 0.8), (right[1], 0.8)))
    assert best.token_ids == rows[0].token_ids
    best = choose_most_probable(prompts, rows, probes, seams((right[0] + 1, 0.9), (right[1], 0.8)))
    assert best.token_ids == rows[1].token_ids
    assert (best.num_forwards, best.num_positions) == (2 + 3 + 1 + 1, 20)
