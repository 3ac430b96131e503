"""Raw and filtered confidences keep the order of unmasking at every temperature; tempered confidences warn."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from refusion_lit.decoding import BlockDiffusion, Decoder, FastDLLM, Generation, LLaDA, TokenEditing, decode
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.fakes import OracleModel, oracle_text

LENGTH = 16
BIDIRECTIONAL = ModelTraits(attention="bidirectional", predictions=("mask",))
BLOCKS = ModelTraits(attention="block_causal", block_size=LENGTH, predictions=("mask", "visible"))
CASES: dict[str, Decoder] = {
    "maskgit_plus": LLaDA(order="maskgit_plus", confidence="tempered"),
    "topk_margin": LLaDA(order="topk_margin", confidence="tempered"),
    "entropy": LLaDA(order="entropy", confidence="tempered"),
    "fast_dllm": FastDLLM(order="maskgit_plus", confidence="tempered", block_length=LENGTH, threshold=0.985),
    "fast_dllm_entropy": FastDLLM(order="entropy", confidence="tempered", block_length=LENGTH, threshold=None),
    "sdar": BlockDiffusion(block_size=LENGTH, confidence="tempered", threshold=0.985),
    "sdar_entropy": BlockDiffusion(block_size=LENGTH, confidence="tempered", sampling_rule="entropy_bounded"),
}


def list_unmasked(decoder: Decoder, temperature: float) -> list[list[int]]:
    """Return the positions that each forward unmasks, for a model whose certainty has no order in the text."""
    traits = BLOCKS if isinstance(decoder, BlockDiffusion) else BIDIRECTIONAL
    trace = decode_oracle(decoder, temperature, traits).trace
    return [sorted(entry.accepted) for entry in trace if entry.accepted]


def decode_oracle(decoder: Decoder, temperature: float, traits: ModelTraits) -> Generation:
    # The certainties of the 16 places lie between 0.97 and 0.999, in a mixed order; the thresholds are in the middle.
    model = OracleModel(oracle_text(None), certainty=lambda place: 0.97 + 0.029 * (place * 7 % 16) / 16, traits=traits)
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=temperature)
    prompt = Prompt(token_ids=tuple([3] * LENGTH), id="p")
    [row] = decode(model, decoder, [prompt], sampling, trace=True).rows
    return row


@pytest.mark.parametrize("confidence", ["raw", "filtered"])
@pytest.mark.parametrize("temperature", [0.01, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_raw_and_filtered_confidences_do_not_depend_on_the_temperature(
    name: str, temperature: float, confidence: str
) -> None:
    decoder = replace(CASES[name], confidence=confidence)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy = list_unmasked(decoder, 0.0)
        assert list_unmasked(decoder, temperature) == greedy
    assert greedy != sorted(greedy), "not left to right"


@pytest.mark.parametrize("name", CASES)
def test_tempered_confidences_warn_of_a_low_temperature(name: str) -> None:
    with pytest.warns(UserWarning, match="confidence: filtered"):
        low = list_unmasked(CASES[name], 0.02)
    assert low == sorted(low), "left to right, as in the authors' programs"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list_unmasked(CASES[name], 0.0) != low


@pytest.mark.parametrize("make", [LLaDA, FastDLLM])
def test_orders_without_a_choice_refuse_one(make: type[Decoder]) -> None:
    with pytest.raises(ValueError, match="confidence"):
        make(confidence="raw")


def test_token_editing_fills_more_masks_by_tempered_confidences() -> None:
    """A block is committed at once, so that the number of forwards shows what passes the threshold."""
    raw = TokenEditing(block_size=LENGTH, mask_threshold=0.985, edit_threshold=1.0)
    tempered = replace(raw, confidence="tempered")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy = decode_oracle(raw, 0.0, BLOCKS).num_forwards
        assert decode_oracle(tempered, 0.0, BLOCKS).num_forwards == greedy
        assert decode_oracle(raw, 0.02, BLOCKS).num_forwards == greedy
        assert decode_oracle(replace(raw, confidence="filtered"), 0.02, BLOCKS).num_forwards == greedy
    with pytest.warns(UserWarning, match="confidence: filtered"):
        assert decode_oracle(tempered, 0.02, BLOCKS).num_forwards < greedy
