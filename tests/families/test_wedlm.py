"""WeDLM's window and selection; tests/goldens compares it with the authors' programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import ModelMismatchError, WeDLM, decode
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import prompts
from support.example_counts import examples
from support.fakes import MASK, PAD, SPECIAL, VOCAB, HashModel, tiny_backbone, tiny_qwen
from support.slow_decoding import best_allowed

MASKS = ModelTraits(predictions=("mask", "next_token"))
NO_END = replace(SPECIAL, eos_token_ids=(VOCAB + 2,))
"""Special tokens without an end of sequence that the model could give."""


@torch.no_grad()
def compute_logits(tokens: list[int], positions: list[int]) -> Tensor:
    """Run tokens causally in the given order, without a cache."""
    visible = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).tril()
    ids, places = torch.tensor([tokens]), torch.tensor([positions])
    return tiny_qwen()(ids, attention_mask=visible, position_ids=places, use_cache=False).logits[0]


def test_decoding_ends_with_the_forward_pass_that_fills_the_last_token() -> None:
    decoder, prompt = WeDLM(window_size=4, entropy_threshold=9.0, position_penalty=0.0), Prompt(token_ids=(3,), id="p")
    [row] = decode(tiny_backbone(MASKS, NO_END), decoder, [prompt], SamplingParams(max_new_tokens=10)).rows
    # Each forward pass fills four masks. The second and third also feed the four tokens before them.
    assert row.forward_shapes == [(1, 5), (1, 8), (1, 8)]


@settings(max_examples=examples(24), deadline=None)
@given(
    seed=st.integers(0, 99),
    drawn_prompts=prompts(max_size=1),
    lengths=st.tuples(st.integers(1, 9), st.integers(10, 25)),
)
def test_a_longer_limit_only_adds_tokens(seed: int, drawn_prompts: list[Prompt], lengths: tuple[int, int]) -> None:
    model, decoder = HashModel(seed, traits=MASKS), WeDLM(window_size=5)
    short, long = (
        decode(model, decoder, drawn_prompts, SamplingParams(max_new_tokens=length)).rows[0] for length in lengths
    )
    assert long.token_ids[: short.num_tokens] == short.token_ids


def test_blocks_are_completed_one_after_another() -> None:
    decoder = WeDLM(selection="confidence", window_size=4, confidence_threshold=None)
    prompt = Prompt(token_ids=(3, 4, 5), id="p")
    [row] = decode(tiny_backbone(MASKS, NO_END), decoder, [prompt], SamplingParams(max_new_tokens=10), trace=True).rows
    blocks = [(position - 3) // 4 for entry in row.trace for position in entry.accepted]
    assert blocks == [0] * 4 + [1] * 4 + [2] * 2
    assert row.num_forwards == 10


def test_a_window_of_one_predicts_the_tokens_one_after_another_with_a_mask() -> None:
    text = [3, 4, 5]
    for _ in range(12):
        logits = compute_logits([*text, MASK], list(range(len(text) + 1)))[-1]
        text.append(best_allowed(logits, (PAD, MASK), VOCAB))
    prompt, decoder = Prompt(token_ids=(3, 4, 5), id="p"), WeDLM(window_size=1)
    [row] = decode(tiny_backbone(MASKS, NO_END), decoder, [prompt], SamplingParams(max_new_tokens=12)).rows
    assert row.token_ids == text[3:]
    assert row.num_forwards == 12


@pytest.mark.parametrize("threshold", [None, -1.0])
def test_without_a_threshold_each_forward_fills_one_token(threshold: float | None) -> None:
    prompt, decoder = Prompt(token_ids=(3, 4, 5), id="p"), WeDLM(window_size=6, entropy_threshold=threshold)
    model = tiny_backbone(MASKS, NO_END)
    [row] = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=20), trace=True).rows
    assert {len(entry.accepted) for entry in row.trace} == {1}
    assert [entry.accepted for entry in row.trace] != sorted(entry.accepted for entry in row.trace), "not left to right"


def test_the_entropy_ignores_temperature_and_filters() -> None:
    """A filter that leaves one token would make the entropy zero and every mask sure."""
    prompt, decoder = Prompt(token_ids=(3, 4, 5), id="p"), WeDLM(window_size=6, entropy_threshold=0.5)
    plain, filtered = (
        decode(tiny_backbone(MASKS, NO_END), decoder, [prompt], SamplingParams(max_new_tokens=20, **options)).rows[0]
        for options in ({}, {"temperature": 3.0, "top_k": 1})
    )
    assert filtered.token_ids == plain.token_ids
    assert filtered.forward_shapes == plain.forward_shapes


@pytest.mark.parametrize("options", [{"window_size": 0}, {"position_penalty": -0.1}, {"confidence_threshold": 1.5}])
def test_impossible_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        WeDLM(**options)


def test_models_without_mask_predictions_are_refused() -> None:
    model = tiny_backbone(ModelTraits(predictions=("next_token",)))
    with pytest.raises(ModelMismatchError, match="needs the predictions mask"):
        decode(model, WeDLM(), [Prompt(token_ids=(3,), id="p")], SamplingParams())
