"""Requests that arrive and leave while the engine runs: other requests change no answer. Constraints on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit import load
from refusion_lit.decoding import Autoregressive, Decoder, Generation, ReFusion, decode
from refusion_lit.engine.engine import Engine
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.types import Constraint, ConstraintState, DecodingOptions, Prompt, SamplingParams
from support.decoder_cases import DECODERS, hash_models, is_accepted, setups, traits_for
from support.example_counts import examples
from support.fakes import EOS, VOCAB, HashModel
from support.scripted import decode_letters

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"


@dataclass(frozen=True)
class Request:
    """A request and its times.

    Attributes:
        prompt: The prompt.
        sampling: The sampling options.
        arrives: The step before which the request is submitted.
        leaves: Number of steps after which the request is aborted; ``None``: never.
    """

    prompt: Prompt
    sampling: SamplingParams
    arrives: int
    leaves: int | None


def serve(engine: Engine, requests: Sequence[Request]) -> dict[int, Generation]:
    """Run the engine step by step while requests arrive and leave."""
    generations: dict[int, Generation] = {}
    last = max(request.arrives + (request.leaves or 0) for request in requests)
    time = 0
    while time <= last or engine.waiting or engine.running:
        for index, request in enumerate(requests):
            if request.arrives == time:
                engine.submit(index, request.prompt, request.sampling)
            if request.leaves is not None and request.arrives + request.leaves == time:
                engine.abort(index)
                assert all(row.index != index for row in engine.running), "its row is free at once"
        generations |= engine.step()
        time += 1
    return generations


def check(model: LanguageModel, decoder: Decoder, requests: Sequence[Request], **options: Any) -> None:
    """Assert that requests in flight together get the answers that they get alone."""
    engine = Engine(model, decoder, 3, DecodingOptions(**options), detokenize=decode_letters)
    with torch.no_grad():
        generations = serve(engine, requests)
    assert not engine.running
    for index, request in enumerate(requests):
        if request.leaves is None or index in generations:
            [alone] = decode(model, decoder, [request.prompt], request.sampling, detokenize=decode_letters).rows
            row = generations[index]
            assert (row.text, row.token_ids, row.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)


@st.composite
def schedules(draw: st.DrawFn, decoder: Decoder, sampling: SamplingParams) -> list[Request]:
    """Draw requests with various lengths, options, stop strings and templates; some prompts begin alike."""
    common = draw(st.lists(st.integers(3, VOCAB - 1), max_size=4)) * 20
    requests = []
    for number in range(draw(st.integers(2, 7))):
        ids = (*draw(st.sampled_from([(), common])), *draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=5)))
        options = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            top_k=draw(st.sampled_from([None, 3])),
            seed=draw(st.integers(0, 3)),
            stop=draw(st.sampled_from([(), ("e",), ("fg", "h")])),
        )
        shorter = replace(options, max_new_tokens=draw(st.integers(1, options.max_new_tokens)))
        options = shorter if is_accepted(decoder.check, sampling=shorter) else options
        prompt = Prompt(token_ids=ids, id=f"p{number % 3}")
        given = draw(st.lists(st.sampled_from([None, 6, 7, 8]), max_size=min(options.max_new_tokens, 9)))
        filled = replace(prompt, given=tuple(given))
        prompt = filled if decoder.refusal(filled) is None else prompt
        arrives = draw(st.integers(0, 12))
        leaves = draw(st.none() | st.integers(0, 6))
        requests.append(Request(prompt, options, arrives, leaves))
    return requests


@pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
@settings(max_examples=3, deadline=None)
@given(data=st.data(), make=hash_models(("plain", "ties")), budget=st.sampled_from([None, 9]))
def test_an_answer_is_the_same_alone_and_among_others(cls: type[Decoder], data: Any, make: Any, budget: Any) -> None:
    decoder, sampling = data.draw(setups(cls))
    check(make(decoder), decoder, data.draw(schedules(decoder, sampling)), max_tokens_per_forward=budget)


LENGTHS = (5, 24, 11, 16, 9, 30, 8, 2)


@pytest.mark.parametrize(
    "decoder", [Autoregressive(), ReFusion(slot_size=4)], ids=lambda decoder: type(decoder).__name__
)
def test_bfloat16_answers_are_the_same_among_others(decoder: Decoder) -> None:
    """Lengths, noise, arrivals and aborts differ; with batch_invariant, rounding does not."""
    overrides = BackboneConfig(source=str(MODEL), batch_invariant=True)
    model = load(MODEL, dtype="bfloat16", device="cpu", overrides=overrides)
    requests = []
    for number, length in enumerate(LENGTHS):
        ids = tuple(model.encode(f"{37 * number + 12}+{91 * number % 77}="))
        sampling = SamplingParams(max_new_tokens=length, temperature=number % 3 / 2, seed=number)
        requests.append(Request(Prompt(token_ids=ids, id="0"), sampling, number, 3 if number == 3 else None))
    options = DecodingOptions(allow_mismatch=True)
    engine = Engine(model.backbone, decoder, 3, options, detokenize=model.detokenize)
    with torch.no_grad():
        generations = serve(engine, requests)
    for index, request in enumerate(requests):
        if request.leaves is None:
            alone = model.decode([request.prompt], decoder, request.sampling, allow_mismatch=True).rows[0]
            assert (generations[index].text, generations[index].token_ids) == (alone.text, alone.token_ids)


def test_aborting_what_is_not_there_changes_nothing() -> None:
    engine = Engine(HashModel(traits=traits_for(Autoregressive())), Autoregressive(), 2)
    engine.abort(7)
    engine.submit(7, Prompt(token_ids=(3,), id="a"), SamplingParams(max_new_tokens=2))
    engine.abort(7)
    assert [*engine.waiting, *engine.running] == []


LOW = (3, 4, 6, 7, 8)
HIGH = (9, 10, 11, 12)
"""Ids that are ordinary tokens of all fakes."""


def allow(*ids: int) -> torch.Tensor:
    """Return which tokens of the vocabulary are among these ids."""
    return torch.isin(torch.arange(VOCAB), torch.tensor(ids))


def make_constraint(state: type[ConstraintState], *, left_to_right: bool = False) -> Constraint:
    return Constraint(begin=lambda _: state(), left_to_right=left_to_right)


class Alternating(ConstraintState):
    """Even places hold low ids, odd places high ids. The EOS token is allowed nowhere."""

    def allowed_tokens(self, place: int, before: Sequence[int]) -> torch.Tensor:
        return allow(*(HIGH if place % 2 else LOW))


@pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
@settings(max_examples=3, deadline=None)
@given(data=st.data(), make=hash_models(("plain", "ties", "extreme")), temperature=st.sampled_from([0.0, 1.0]))
def test_a_constraint_holds_for_every_token(cls: type[Decoder], data: Any, make: Any, temperature: float) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = SamplingParams(max_new_tokens=sampling.max_new_tokens, temperature=temperature)
    prompts = [
        Prompt(token_ids=(3, 4), id="a", constraint=make_constraint(Alternating)),
        Prompt(token_ids=(3, 5), id="b"),
    ]
    model = make(decoder)
    row, free = decode(model, decoder, prompts, sampling, batch_size=2).rows
    state = Alternating()
    assert all(state.allowed_tokens(place, ())[token] for place, token in enumerate(row.token_ids))
    assert row.num_tokens == sampling.max_new_tokens
    assert free.token_ids == decode(model, decoder, prompts[1:], sampling).rows[0].token_ids


class Ascending(ConstraintState):
    """Tokens must grow; the EOS token must follow the highest token, which ``settle`` writes into the third place."""

    def allowed_tokens(self, place: int, before: Sequence[int]) -> torch.Tensor | None:
        if len(before) != place or max(before, default=0) >= VOCAB:
            return None  # a place after a drafter's masks, of which the tokens before are unknown
        larger = [token for token in (*LOW, *HIGH) if token > max(before, default=0)]
        return allow(*(larger or [EOS]))

    def settle(self, place: int, before: Sequence[int], token: int) -> int:
        return HIGH[-1] if place == 2 and token != EOS else token


@pytest.mark.parametrize("cls", [cls for cls in DECODERS if cls.__name__ in ("Autoregressive", "SelfSpeculative")])
@settings(max_examples=examples(8), deadline=None)
@given(data=st.data(), make=hash_models(("plain", "ties")), temperature=st.sampled_from([0.0, 1.0]))
def test_a_constraint_from_left_to_right_sees_all_tokens_before(
    cls: type[Decoder], data: Any, make: Any, temperature: float
) -> None:
    decoder, _ = data.draw(setups(cls))
    model = make(decoder)
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
    prompt = Prompt(token_ids=(3, 4), id="a", constraint=make_constraint(Ascending, left_to_right=True))
    if not decoder.is_left_to_right:
        with pytest.raises(ValueError, match=r"^constraint: expected a decoder .* left to right, got Self"):
            decode(model, decoder, [prompt], sampling)
        return
    row = decode(model, decoder, [prompt], sampling).rows[0]
    tokens = row.token_ids
    assert tokens[-2:] == [HIGH[-1], EOS]
    assert len(tokens) <= 4
    assert tokens[:-1] == sorted({*tokens[:-1]})
    if temperature == 0 or getattr(decoder, "coupling", "shared_noise") == "shared_noise":
        assert tokens == decode(model, Autoregressive(), [prompt], sampling, allow_mismatch=True).rows[0].token_ids
