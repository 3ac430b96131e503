"""What is refused before decoding: models that do not fit, impossible calls, positions beyond the model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from refusion_lit.contrib import D2F, SlotSearch
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.decoding import (
    Autoregressive,
    BlockDiffusion,
    Decoder,
    ModelMismatchError,
    ReFusion,
    TokenEditing,
    WeDLM,
    decode,
)
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.tasks import Additions
from refusion_lit.text_model import TextModel
from refusion_lit.types import ModelTraits, SamplingParams
from support.decoder_cases import traits_for
from support.fakes import HYBRID, SPECIAL, HashModel
from support.scripted import NEXT_TOKEN, make_prompts


def test_models_without_a_mask_token_are_refused_where_one_is_fed() -> None:
    special = replace(SPECIAL, mask_token_id=None)
    with pytest.raises(ValueError, match=r"^decoder: expected a model with a mask token"):
        decode(HashModel(special=special), ReFusion(), make_prompts(2), SamplingParams(), allow_mismatch=True)
    decode(
        HashModel(special=special, traits=NEXT_TOKEN),
        Autoregressive(),
        make_prompts(2),
        SamplingParams(max_new_tokens=3),
    )


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (
            ModelTraits(attention="bidirectional", predictions=("mask",)),
            "causal attention, .* trained with bidirectional",
        ),
        (ModelTraits(predictions=("next_token",)), "needs the predictions mask, .* trained for next_token"),
        (ModelTraits(predictions=("mask",)), "needs the predictions next_token_in_slot, .* trained for mask"),
        (ModelTraits(predictions=()), "trained for none"),
    ],
)
def test_models_trained_otherwise_are_refused_or_marked(traits: ModelTraits, reason: str) -> None:
    arguments = ReFusion(), make_prompts(2), SamplingParams(max_new_tokens=16)
    with pytest.raises(ModelMismatchError, match=f"ReFusion does not fit this model: .*{reason}.*allow_mismatch"):
        decode(HashModel(traits=traits), *arguments)
    with pytest.warns(UserWarning, match=reason):
        output = decode(HashModel(traits=traits), *arguments, allow_mismatch=True)
    assert len(output.mismatches) >= 1
    assert output.rows[0].num_tokens > 0


@pytest.mark.parametrize(
    ("traits", "hint"),
    [
        (ModelTraits(attention="bidirectional", predictions=("mask",)), "LLaDA fits"),
        (ModelTraits(predictions=("next_token",)), "Autoregressive fits"),
        (ModelTraits(predictions=("mask",)), "WeDLM fits"),
        (ModelTraits(attention="block_causal", block_size=4, predictions=("mask",)), "BlockDiffusion fits"),
        (ModelTraits(predictions=()), "trained for none.*allow_mismatch"),
    ],
)
def test_a_decoder_that_fits_is_named(traits: ModelTraits, hint: str) -> None:
    backbone: Any = HashModel(traits=traits)
    with pytest.raises(ModelMismatchError, match=hint):
        TextModel(backbone, tokenizer=None).check_decoder(ReFusion())


@pytest.mark.parametrize("traits", [HYBRID, ModelTraits(predictions=("mask", "next_token")), ModelTraits()])
def test_fitting_and_unknown_models_are_taken(traits: ModelTraits) -> None:
    assert decode(HashModel(traits=traits), ReFusion(), make_prompts(2), SamplingParams()).mismatches == []


@pytest.mark.parametrize(
    ("prompt_lengths", "sampling", "batch_size", "message"),
    [
        ([1], SamplingParams(), 0, "^batch_size: .* at least 1, got 0"),
        ([1, 0], SamplingParams(), 1, "^prompt p1: expected at least one token"),
        ([1], SamplingParams(stop=("x",)), 1, "^stop: expected a tokenizer"),
    ],
)
def test_impossible_calls_are_refused(
    prompt_lengths: list[int], sampling: SamplingParams, batch_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode(HashModel(), ReFusion(), make_prompts(*prompt_lengths), sampling, batch_size=batch_size)


@pytest.mark.parametrize("decoder", [BlockDiffusion(block_size=16), D2F(), ReFusion(), SlotSearch(), TokenEditing(),
                                     WeDLM()], ids=lambda decoder: type(decoder).__name__)  # fmt: skip
def test_nothing_is_fed_beyond_learnt_positions(decoder: Decoder) -> None:
    options = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 24}
    tokenizer = CharacterTokenizer().build(Additions())
    model = BackboneConfig(config=options).build(tokenizer, seed=0).eval()
    model.traits = traits_for(decoder)
    [short, long] = make_prompts(2, 13)
    sampling = SamplingParams(max_new_tokens=5)
    with pytest.raises(ValueError, match=r"^prompt p\d: expected .* 24 positions"):
        decode(model, decoder, [short, long], replace(sampling, max_new_tokens=11))
    small = {"block_size": 4, "slot_size": 4, "window_size": 4}
    fields = {name: value for name, value in small.items() if hasattr(decoder, name)}
    decoder = replace(decoder, **fields)
    model.traits = traits_for(decoder)
    [row] = decode(model, decoder, [long], sampling).rows
    assert row.finish_reason in ("eos", "length")
