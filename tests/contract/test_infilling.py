"""What every decoder promises for tokens that are given in the response: it keeps them, or refuses with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refusion_lit.constraints.schema_templates import Span, TemplateState
from refusion_lit.contrib import APD, CARD, D2F, Convolutional, SetDiffusion, SlotSearch
from refusion_lit.decoding import (
    Autoregressive,
    BlockDiffusion,
    CausalBlockDiffusion,
    Decoder,
    FastDLLM,
    FirstHitting,
    IntrospectiveStrided,
    LinearSpeculation,
    LLaDA,
    RecomputeKV,
    ReFusion,
    SelfSpeculative,
    TokenEditing,
    UniformDiffusion,
    WeDLM,
    decode,
)
from refusion_lit.types import Constraint, Prompt, SamplingParams
from support.decoder_cases import (
    DECODERS,
    LastState,
    fill_until_accepted,
    hash_models,
    prompts,
    setups,
    temperatures,
    traits_for,
    weighs_rows,
)
from support.example_counts import examples
from support.fakes import EOS, HYBRID, MASK, PAD, VOCAB, FakeModel, HashModel, OracleModel, oracle_text, tiny_backbone

KEEPS = {BlockDiffusion, Convolutional, D2F, FastDLLM, FirstHitting, LLaDA, ReFusion, RecomputeKV, SetDiffusion,
         SlotSearch, TokenEditing, WeDLM}  # fmt: skip
REFUSES = {APD, Autoregressive, SelfSpeculative, CARD, IntrospectiveStrided, CausalBlockDiffusion,
           LinearSpeculation, UniformDiffusion}  # fmt: skip


def template_constraint(size: int, spans: dict[int, Span]) -> Constraint:
    return Constraint(begin=lambda _: TemplateState(size, spans), left_to_right=False)


@st.composite
def templates(draw: st.DrawFn, max_holes: int) -> tuple[int | None, ...]:
    """Draw given tokens of a response, the mask and padding among them; an end of sequence only at the end."""
    ends = (EOS, 5)  # the EOS tokens of both kinds of special tokens in ``SPECIALS``
    places = st.none() | st.sampled_from([t for t in range(VOCAB) if t not in ends])
    tokens = draw(st.lists(places, max_size=20))
    holes = [place for place, token in enumerate(tokens) if token is None]
    for place in holes[max_holes:]:
        tokens[place] = 3
    return (*tokens, EOS) if draw(st.booleans()) else tuple(tokens)


@st.composite
def cases(
    draw: st.DrawFn,
    cls: type[Decoder],
    make: Callable[[Decoder], HashModel] | None = None,
    temperature: float = 0.0,
    max_size: int = 4,
) -> tuple[Decoder, SamplingParams, list[Prompt]]:
    """Draw a decoder that keeps given tokens, and prompts with and without them; given ends of a model come last."""
    decoder, sampling = draw(setups(cls))
    drawn_prompts = draw(prompts(max_size=max_size))
    assume(decoder.refusal(drawn_prompts[0]) is None)
    templated = [replace(p, given=draw(templates(sampling.max_new_tokens))) for p in drawn_prompts]
    requests = [fill_until_accepted(decoder, prompt) for prompt in templated]
    ends = set() if make is None else {*make(decoder).special_tokens.eos_token_ids}
    assume(not any({*prompt.given[:-1]} & ends for prompt in requests))
    return decoder, replace(sampling, temperature=temperature), requests


def num_positions(model: FakeModel) -> int:
    return sum(call.input_ids.numel() for call in model.calls)


FAR_RIGHT = Prompt(token_ids=(3,), id="p7", given=(*[None] * 40, 4))
"""A token so far on the right that a decoder with blocks or a window fills the first holes without seeing it."""


def keeps(cls: type[Decoder]) -> bool:
    return cls().refusal(Prompt(token_ids=(3,), id="p", given=(None, 4))) is None


keepers = pytest.mark.parametrize("cls", list(filter(keeps, DECODERS)), ids=lambda cls: cls.__name__)


def test_decoders_keep_given_tokens_or_not() -> None:
    kept = set(filter(keeps, DECODERS))
    assert kept == KEEPS, "a new decoder belongs into KEEPS or into REFUSES"
    assert set(DECODERS) - kept == REFUSES
    has_reason = [cls.refuses != Decoder.refuses or cls.refusal is not Decoder.refusal for cls in DECODERS]
    assert all(has_reason), "refuses without a reason of its own"


@pytest.mark.parametrize(
    "cls", [cls for cls in DECODERS if cls().refusal(FAR_RIGHT) is not None], ids=lambda cls: cls.__name__
)
def test_a_refusal_comes_before_work_and_names_the_reason(cls: type[Decoder]) -> None:
    decoder = cls()
    model = HashModel(1, traits=traits_for(decoder))
    with pytest.raises(ValueError, match=f"^decoder: {cls.__name__} .*template of prompt p7") as error:
        decode(model, decoder, [FAR_RIGHT], SamplingParams(max_new_tokens=64))
    assert str(decoder.refusal(FAR_RIGHT)) in str(error.value)
    assert not model.calls


@keepers
@settings(max_examples=examples(22), deadline=None)
@given(data=st.data(), make=hash_models(), temperature=temperatures(), size=st.integers(1, 4))
def test_given_tokens_stay_and_holes_are_filled(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    temperature: float,
    size: int,
) -> None:
    decoder, sampling, drawn_prompts = data.draw(cases(cls, make, temperature))
    model, watcher = make(decoder), LastState()
    ends = model.special_tokens.eos_token_ids
    rows = decode(model, decoder, drawn_prompts, sampling, batch_size=size, callbacks=[watcher]).rows
    never = {model.special_tokens.mask_token_id, model.special_tokens.pad_token_id} - set(ends)
    for index, (prompt, row) in enumerate(zip(drawn_prompts, rows, strict=True)):
        length = prompt.given_length
        assert len(row.token_ids) >= length
        for place, token in enumerate(prompt.given[:length]):
            assert token in (None, row.token_ids[place])
        generated = [t for place, t in enumerate(row.token_ids) if place >= length or prompt.given[place] is None]
        assert not never & set(generated)
        assert row.num_tokens == len(generated) <= sampling.max_new_tokens
        assert row.num_given == prompt.num_given
        assert not {*ends} & {*row.token_ids[:-1]}, "no end in a hole, and nothing after an end"
        is_closed = bool(prompt.given) and prompt.given[-1] in ends
        assert row.finish_reason == ("eos" if row.token_ids[-1] in ends else "length")
        assert not is_closed or len(row.token_ids) == len(prompt.given)
        if row.finish_reason == "length":
            assert row.num_tokens == sampling.max_new_tokens
        if index in watcher.states:
            state = watcher.states[index]
            known = {place for place, token in enumerate(prompt.given) if token is not None}
            assert not known & set(state.committed)
            assert row.num_forwards >= 1
        else:
            assert not generated
            assert row.num_forwards == 0
    assert num_positions(model) >= sum(row.num_positions for row in rows)


@keepers
@settings(max_examples=examples(14), deadline=None)
@given(data=st.data(), make=hash_models(), temperature=temperatures(), size=st.integers(2, 4))
def test_a_row_is_what_it_is_alone(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    temperature: float,
    size: int,
) -> None:
    decoder, sampling, drawn_prompts = data.draw(cases(cls, make, temperature))
    rows = decode(make(decoder), decoder, drawn_prompts, sampling, batch_size=size).rows
    for prompt, row in zip(drawn_prompts, rows, strict=True):
        [alone] = decode(make(decoder), decoder, [prompt], sampling).rows
        assert row.token_ids == alone.token_ids
        if not weighs_rows(decoder):
            assert row.forward_shapes == alone.forward_shapes
            assert row.num_positions == alone.num_positions


@keepers
@settings(max_examples=examples(6), deadline=None)
@given(data=st.data(), size=st.integers(2, 4))
def test_a_row_of_a_transformer_is_what_it_is_alone(cls: type[Decoder], data: st.DataObject, size: int) -> None:
    decoder, sampling, drawn_prompts = data.draw(cases(cls))
    # Where every key is the mask's, the certainty of all places ties but for rounding.
    assume(not any({*prompt.token_ids, *prompt.given} <= {MASK, None} for prompt in drawn_prompts))
    model = tiny_backbone(traits_for(decoder))
    rows = decode(model, decoder, drawn_prompts, sampling, batch_size=size).rows
    number = data.draw(st.integers(0, len(rows) - 1))
    [alone] = decode(model, decoder, [drawn_prompts[number]], sampling).rows
    assert rows[number].token_ids == alone.token_ids


@keepers
@settings(max_examples=examples(6), deadline=None)
@given(data=st.data(), make=hash_models(), temperature=temperatures(), size=st.integers(1, 4))
def test_whatever_is_drawn_a_span_is_one_of_its_alternatives(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    temperature: float,
    size: int,
) -> None:
    """A schema's templates need this: drafts that were rejected, verified or edited must not mix two alternatives.

    A span is a run of holes. An alternative allows a set of tokens for every hole of the span.
    """
    decoder, sampling, drawn_prompts = data.draw(cases(cls, make, temperature))
    special = make(decoder).special_tokens
    allowed_ids = {*range(special.vocab_size)} - {*special.eos_token_ids, *special.banned_token_ids}
    sets = st.sets(st.sampled_from(sorted(allowed_ids)), min_size=1)
    constrained, spans_of_prompts = [], []
    for prompt in drawn_prompts:
        spans = {
            start: data.draw(st.lists(st.lists(sets, min_size=num, max_size=num), min_size=1, max_size=3))
            for start, num in find_spans(prompt).items()
        }
        tensors = {
            start: [[torch.tensor(sorted(ids)) for ids in alternative] for alternative in alternatives]
            for start, alternatives in spans.items()
        }
        constrained.append(replace(prompt, constraint=template_constraint(special.vocab_size, tensors)))
        spans_of_prompts.append(spans)
    rows = decode(make(decoder), decoder, constrained, sampling, batch_size=size).rows
    for spans, row in zip(spans_of_prompts, rows, strict=True):
        for start, alternatives in spans.items():
            tokens = row.token_ids[start:]
            assert any(all(tokens[i] in ids for i, ids in enumerate(alternative)) for alternative in alternatives)
    number = data.draw(st.integers(0, len(rows) - 1))
    [alone] = decode(make(decoder), decoder, [constrained[number]], sampling).rows
    assert rows[number].token_ids == alone.token_ids


def find_spans(prompt: Prompt) -> dict[int, int]:
    """Return the lengths of the runs of holes before the last given token, by the place of their first hole."""
    spans: dict[int, int] = {}
    for place in range(prompt.given_length):
        if prompt.given[place] is None:
            continues_span = place > 0 and prompt.given[place - 1] is None
            start = list(spans)[-1] if continues_span else place
            spans[start] = spans.get(start, 0) + 1
    return spans


# Seeds of cases in which a batch of eight makes fewer plans than the prompt alone.
@pytest.mark.parametrize("seed", [13, 16, 17])
def test_drafts_that_other_prompts_make_dearer_leave_a_span_as_it_is(seed: int) -> None:
    """Bonus infill makes fewer plans where many rows share a forward's cost, and each draw narrows a span."""
    rng = random.Random(seed)
    ids = range(3, VOCAB)
    num = rng.choice([8, 12, 16])
    # So many alternatives that most tokens are possible at first, and each draw rules some of them out.
    alternatives = [[torch.tensor(sorted(rng.sample(ids, rng.randint(7, 10)))) for _ in range(num)] for _ in range(400)]
    prompt_ids = tuple(rng.randrange(3, VOCAB) for _ in range(4))
    given = (5, *[None] * num, 6, EOS)
    prompt = Prompt(token_ids=prompt_ids, id="p", given=given, constraint=template_constraint(VOCAB, {1: alternatives}))
    size = rng.choice([4, 6, 8])
    decoder = ReFusion(slot_size=size, num_serial_blocks=1, slot_threshold=0.5, token_threshold=0.5, infill="bonus")
    sampling = SamplingParams(max_new_tokens=16)
    others = [replace(prompt, id=f"q{i}") for i in range(7)]
    model = HashModel(seed, traits=HYBRID)
    [alone] = decode(model, decoder, [prompt], sampling).rows
    assert decode(model, decoder, [prompt, *others], sampling, batch_size=8).rows[0].token_ids == alone.token_ids


@keepers
@settings(max_examples=examples(11), deadline=None)
@given(data=st.data(), make=hash_models(), temperature=temperatures())
def test_a_template_that_gives_nothing_changes_nothing(
    cls: type[Decoder], data: st.DataObject, make: Callable[[Decoder], HashModel], temperature: float
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature)
    drawn_prompts = data.draw(prompts(max_size=2))
    empty = [replace(prompt, given=(None,) * data.draw(st.integers(0, 9))) for prompt in drawn_prompts]
    models = make(decoder), make(decoder)
    first, second = (
        decode(model, decoder, some, sampling) for model, some in zip(models, (drawn_prompts, empty), strict=True)
    )
    assert [row.token_ids for row in first.rows] == [row.token_ids for row in second.rows]
    assert [call.fed for call in models[0].calls] == [call.fed for call in models[1].calls]


@keepers
@settings(max_examples=examples(11), deadline=None)
@given(data=st.data())
def test_an_oracle_fills_holes_exactly(cls: type[Decoder], data: st.DataObject) -> None:
    decoder, sampling, drawn_prompts = data.draw(cases(cls, max_size=2))
    text = oracle_text(None)
    model = OracleModel(text, certainty=lambda place: 0.9 - 1e-6 * place, traits=traits_for(decoder))
    for prompt, row in zip(drawn_prompts, decode(model, decoder, drawn_prompts, sampling).rows, strict=True):
        start = len(prompt.token_ids)
        known = [*prompt.given, *[None] * (len(row.token_ids) - len(prompt.given))]
        expected = [text(start + i) if token is None else token for i, token in enumerate(known)]
        assert row.token_ids == expected[: len(row.token_ids)]


@keepers
def test_an_end_of_sequence_is_given_only_at_the_end(cls: type[Decoder]) -> None:
    decoder = cls()
    model = HashModel(1, traits=traits_for(decoder))
    prompt = Prompt(token_ids=(3,), id="p", given=(4, EOS, None, PAD))
    with pytest.raises(ValueError, match=r"^template: expected an EOS token only at the end"):
        decode(model, decoder, [prompt], SamplingParams(max_new_tokens=8))
    assert not model.calls


@keepers
def test_more_holes_than_may_be_filled_are_refused(cls: type[Decoder]) -> None:
    decoder = cls()
    model = HashModel(1, traits=traits_for(decoder))
    prompt = Prompt(token_ids=(3,), id="p", given=(None, None, 4))
    with pytest.raises(ValueError, match=r"^max_new_tokens: expected at least 2"):
        decode(model, decoder, [prompt], SamplingParams(max_new_tokens=1))
    assert not model.calls
