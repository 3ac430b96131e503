"""Log-probabilities of tokens equal transformers' log-probabilities, and what the forward passes of a decode read."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def read_tokens(row: Generation) -> list[TokenLogprob]:
    """Return the tokens that a forward pass has read; a decoder may write others, which have no probability."""
    return [entry for entry in row.logprobs if entry is not None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_next_token_models_have_the_logprobs_of_transformers(temperature: float) -> None:
    model = load(MODEL, device="cpu", dtype="float64")
    sampling = SamplingParams(max_new_tokens=16, temperature=temperature, top_k=2, seed=3)
    queries = ["12+34,56+78>", "1+1>"]
    rows = model.generate(queries, decoder=Autoregressive(), sampling=sampling, num_top_logprobs=3, batch_size=2)
    for query, row in zip(queries, rows, strict=True):
        ids = torch.tensor([[*model.encode(query), *row.token_ids]])
        with torch.no_grad():
            logits = model.backbone.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        expected = logits.log_softmax(-1)[-len(row.token_ids) - 1 : -1]
        for place, entry in enumerate(read_tokens(row)):
            assert (entry.token_id, entry.forward) == (row.token_ids[place], place + 1)
            assert entry.logprob == pytest.approx(float(expected[place, entry.token_id]), abs=1e-5)
            best = expected[place].topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_masked_models_have_the_logprobs_of_the_canvas_before_the_token() -> None:
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
def test_logprobs_are_the_probabilities_that_forward_passes_read(
    cls: type[Decoder],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    drawn_prompts: list[Prompt],
    temperature: float,
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature)
    # With these options, a decoder's confidence is another number than the token's probability.
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
                scores = zip(trace.scored, trace.scores, strict=True)
                traced = [p for at, token, p in drafts if (at, token) == (position, entry.token_id)]
                traced += [p for at, p in scores if at == position]
                assert not traced or math.exp(entry.logprob) == pytest.approx(traced[0], abs=1e-6)


@each_decoder
@settings(max_examples=1, deadline=None, derandomize=True)
@given(data=st.data(), make=hash_models(["plain"]))
def test_a_batch_changes_nothing(cls: type[Decoder], data: st.DataObject, make: Callable[[Decoder], HashModel]) -> None:
    decoder, sampling = data.draw(setups(cls))
    three_lengths = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (2, 5, 3)]
    rows = decode(make(decoder), decoder, three_lengths, sampling, num_top_logprobs=1, batch_size=3).rows
    for prompt, row in zip(three_lengths, rows, strict=True):
        [alone] = decode(make(decoder), decoder, [prompt], sampling, num_top_logprobs=1).rows
        for entry, entry_alone in zip(read_tokens(row), read_tokens(alone), strict=True):
            assert entry.token_id == entry_alone.token_id
            assert [token for token, _ in entry.top] == [token for token, _ in entry_alone.top]
            assert entry.logprob == pytest.approx(entry_alone.logprob, abs=1e-9)


def test_a_wrong_number_is_refused() -> None:
    model = load(MODEL, device="cpu")
    with pytest.raises(ValueError, match=r"^num_top_logprobs: "):
        model.generate(["1+1>"], num_top_logprobs=-1)
