"""Likelihoods of masked models see what training and decoding show them."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import pytest
import torch

import refusion_lit
from refusion_lit.contrib import SoftTail
from refusion_lit.decoding import LLaDA
from refusion_lit.evaluation.likelihood import is_greedy_text, monte_carlo_masked
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.load import BackboneConfig
from support.attention_masks import order_mask
from support.fakes import tiny_backbone
from support.published import MODELS, published_model

CONTEXT = [1, 2, 10, 3, 4, 14]


def block_model() -> Backbone:
    overrides = BackboneConfig(source="x", attention="block_causal", block_size=4)
    return refusion_lit.load(MODELS["bd3lm-tiny"], overrides=overrides).backbone


def predictions(backbone: Backbone, ids: list[int], block_size: int) -> torch.Tensor:
    """Return log-probabilities [token, vocab] of a forward over whole texts, one block after the other."""
    blocks = (torch.arange(len(ids)) // block_size)[None]
    with torch.no_grad():
        visible = order_mask(blocks, torch.tensor([len(ids)]))
        hidden = backbone.hidden_states(torch.tensor([ids]), torch.arange(len(ids))[None], visible)
        logits = backbone.logits(hidden)[0, :, : backbone.special_tokens.vocab_size]
    return logits.double().log_softmax(-1)


def test_blocks_before_a_mask_are_clean() -> None:
    backbone, size, text = block_model(), 4, [1, 2, 11]  # two tokens of the second block, one of the third
    mask, length, start = backbone.special_tokens.mask_token_id, 3, len(CONTEXT)
    assert mask is not None
    clean, expected = [*CONTEXT, *text], 0.0
    for count in (1, 2, 3):
        for chosen in combinations(range(length), count):
            value = 0.0
            for i in chosen:
                place = start + i
                block = place // size
                noisy = [
                    mask if position // size == block and position - start in chosen else token
                    for position, token in enumerate(clean)
                ]
                stop = min((block + 1) * size, len(clean))
                value += float(predictions(backbone, noisy[:stop], size)[place, text[i]])
            expected += value * length / count / comb(length, count) / length
    actual = monte_carlo_masked(backbone, CONTEXT, text, num_draws=3000, batch_size=500)
    assert actual == pytest.approx(expected, rel=0.05)


def test_a_shifted_blocks_first_token_is_scored_from_the_clean_block_before_it() -> None:
    backbone = published_model("fast-dllm-v2-tiny").backbone
    context = ([1, 2, 10, 3, 4, 13] * 6)[:32]
    actual = monte_carlo_masked(backbone, context, [7], num_draws=1, batch_size=1)
    assert actual == pytest.approx(float(predictions(backbone, context, 32)[-1, 7]), abs=1e-5)
    mask = backbone.special_tokens.mask_token_id
    assert mask is not None
    inside = monte_carlo_masked(backbone, context[:9], [7], num_draws=1, batch_size=1)
    assert inside == pytest.approx(float(predictions(backbone, [*context[:9], mask], 32)[8, 7]), abs=1e-5)


def test_dreams_masks_are_scored_one_place_before() -> None:
    backbone = published_model("dream-tiny").backbone
    mask = backbone.special_tokens.mask_token_id
    assert mask is not None
    actual = monte_carlo_masked(backbone, CONTEXT, [7], num_draws=2, batch_size=1)
    expected = predictions(backbone, [*CONTEXT, mask], 100)[len(CONTEXT) - 1, 7]
    assert actual == pytest.approx(float(expected), abs=1e-5)


def test_a_causal_models_shifted_masks_stay_in_text_order() -> None:
    backbone, context, text = tiny_backbone(SoftTail().traits), [3, 4, 6], [7, 3, 6]
    num_known, clean = len(context), torch.tensor([*context, *text])
    mask, expected = backbone.special_tokens.mask_token_id, 0.0
    for count in (1, 2, 3):
        for chosen in combinations(range(num_known, len(clean)), count):
            ids = clean.clone()
            ids[list(chosen)] = mask
            with torch.no_grad():
                hidden = backbone.hidden_states(ids[None], torch.arange(len(ids))[None], None)
                logits = backbone.logits(hidden)[0, :, : backbone.special_tokens.vocab_size].double()
            value = sum(float(logits.log_softmax(-1)[place - 1, clean[place]]) for place in chosen)
            expected += value * len(text) / count / comb(len(text), count) / len(text)
    actual = monte_carlo_masked(backbone, context, text, num_draws=3000, batch_size=500)
    assert actual == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_counts_of_masks_are_stratified(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    backbone, text, counts = published_model("llada-tiny").backbone, [1, 2, 11, 3, 4], []
    run = backbone.hidden_states

    def count_masks(ids: torch.Tensor, *others: Any) -> torch.Tensor:
        counts.extend((ids == backbone.special_tokens.mask_token_id).sum(1).tolist())
        return run(ids, *others)

    monkeypatch.setattr(backbone, "hidden_states", count_masks)
    monte_carlo_masked(backbone, CONTEXT, text, num_draws=10, batch_size=batch_size)
    assert sorted(counts) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_greedy_text_is_what_is_decoded_one_token_a_step(name: str) -> None:
    model = published_model(name)
    decoder = LLaDA(shifted=name == "dream-tiny")
    for length in (4, 9):
        (row,) = model.generate_ids([CONTEXT], decoder=decoder, max_new_tokens=length)
        assert row.num_tokens == length
        assert is_greedy_text(model.backbone, CONTEXT, row.token_ids)
        for i in range(length):
            other = [*row.token_ids]
            other[i] = (other[i] + 1) % 10
            assert not is_greedy_text(model.backbone, CONTEXT, other)
