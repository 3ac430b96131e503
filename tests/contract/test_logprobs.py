"""Log-probabilities of tokens: what transformers' forward pass gives, and what each forward pass of a decode read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit import load
from refusion_lit.decoding import Autoregressive, CausalBlockDiffusion, Decoder, Generation, LLaDA, TokenLogprob, decode
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import DECODERS, hash_models, prompts, setups, temperatures
from support.example_counts import examples
from support.fakes import HashModel
from support.servers import MODEL

each_decoder = pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
LLADA = MODEL.parents[1] / "published" / "models" / "llada-tiny"


def as_numbers(row: Generation) -> list[tuple[int, float, int, list[int], list[float]]]:
    entries: Iterable[TokenLogprob] = filter(None, row.logprobs)
    return [
        (entry.token_id, entry.logprob, entry.forward, [token for token, _ in entry.top], [p for _, p in entry.top])
        for entry in entries
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_next_token_models_have_those_of_transformers(temperature: float) -> None:
    model = load(MODEL, device="cpu", dtype="float64")
    sampling = SamplingParams(max_new_tokens=16, temperature=temperature, top_k=2, seed=3)
    queries = ["12+34,56+78>", "1+1>"]
    rows = model.generate(queries, decoder=Autoregressive(), sampling=sampling, num_top_logprobs=3, batch_size=2)
    for query, row in zip(queries, rows, strict=True):
        ids = torch.tensor([[*model.encode(query), *row.token_ids]])
        with torch.no_grad():
            logits = model.backbone.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        expected = logits.log_softmax(-1)[-len(row.token_ids) - 1 : -1]
        for place, (token, logprob, forward, top, values) in enumerate(as_numbers(row)):
            assert (token, forward) == (row.token_ids[place], place + 1)
            assert logprob == pytest.approx(float(expected[place, token]), abs=1e-5)
            best = expected[place].topk(3)
            assert top == best.indices.tolist()
            assert values == pytest.approx(best.values.tolist(), abs=1e-5)


def test_masked_models_have_those_of_the_canvas_before_the_token() -> None:
    model = load(LLADA, device="cpu", dtype="float64")
    [row] = model.generate(["12+34,56+78>"], decoder=LLaDA(steps=8), max_new_tokens=32, num_top_logprobs=0, trace=True)
    prompt = model.encode("12+34,56+78>")
    mask = model.backbone.special_tokens.mask_token_id
    ids = torch.tensor([[*prompt, *[mask] * 32]])
    expected: dict[int, float] = {}
    for entry in row.trace:
        with torch.no_grad():
            everything = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
            logprobs = model.backbone.model(input_ids=ids, attention_mask=everything).logits[0].log_softmax(-1)
        drafts = dict(zip(entry.positions, entry.tokens, strict=True))
        for position in entry.accepted:
            expected[position - len(prompt)] = float(logprobs[position, drafts[position]])
            ids[0, position] = drafts[position]
    values = [entry.logprob for entry in row.logprobs if entry is not None]
    assert values == pytest.approx([expected[place] for place in range(len(row.token_ids))], abs=1e-5)


@each_decoder
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data(), make=hash_models(["plain"]), drawn_prompts=prompts(), temperature=temperatures())
def test_they_are_the_probabilities_that_forward_passes_read(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    drawn_prompts: list[Prompt],
    temperature: float,
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature)
    hides_ends = getattr(decoder, "forbid_eos", False) or getattr(decoder, "eos_confidence_zero", False)
    has_raw_confidence = not hides_ends and getattr(decoder, "confidence_temperature", 1.0) == 1
    plain = decode(make(decoder), decoder, drawn_prompts, sampling)
    output = decode(make(decoder), decoder, drawn_prompts, sampling, num_top_logprobs=2, trace=True)
    for row, before in zip(output.rows, plain.rows, strict=True):
        assert (row.token_ids, row.num_forwards) == (before.token_ids, before.num_forwards)
        assert before.logprobs == []
        assert len(row.logprobs) == len(row.token_ids)
        prompt_length = len(next(prompt for prompt in drawn_prompts if prompt.id == row.id).token_ids)
        for place, entry in enumerate(row.logprobs):
            if entry is None:  # an end of the thinking that the decoder writes, and no forward pass has read
                assert isinstance(decoder, CausalBlockDiffusion)
                assert row.token_ids[place] == decoder.end_think_token_id
                continue
            assert entry.token_id == row.token_ids[place]
            assert entry.logprob <= entry.top[0][1] + 1e-9
            assert entry.top[0][1] >= entry.top[1][1]
            if has_raw_confidence:
                position = place + prompt_length
                trace = row.trace[entry.forward - 1]
                drafts = zip(trace.positions, trace.tokens, trace.probabilities, strict=True)
                read = [p for at, token, p in drafts if (at, token) == (position, entry.token_id)]
                read += [p for at, p in zip(trace.scored, trace.scores, strict=True) if at == position]
                assert not read or math.exp(entry.logprob) == pytest.approx(read[0], abs=1e-6)


@each_decoder
def test_a_batch_changes_nothing(cls: type[Decoder]) -> None:
    drawn = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (2, 5, 3)]

    @settings(max_examples=1, deadline=None, derandomize=True)
    @given(setup=setups(cls), make=hash_models(["plain"]))
    def check(setup: tuple, make: Callable[[Decoder], HashModel]) -> None:  # type: ignore[type-arg]
        decoder, sampling = setup
        together = decode(make(decoder), decoder, drawn, sampling, num_top_logprobs=1, batch_size=3).rows
        for prompt, row in zip(drawn, together, strict=True):
            [alone] = decode(make(decoder), decoder, [prompt], sampling, num_top_logprobs=1).rows
            assert [entry[:1] + entry[3:4] for entry in as_numbers(alone)] == [
                entry[:1] + entry[3:4] for entry in as_numbers(row)
            ]
            assert [entry[1] for entry in as_numbers(alone)] == pytest.approx([e[1] for e in as_numbers(row)], abs=1e-9)

    check()


def test_a_wrong_number_is_refused() -> None:
    model = load(MODEL, device="cpu")
    with pytest.raises(ValueError, match=r"^num_top_logprobs: "):
        model.generate(["1+1>"], num_top_logprobs=-1)
