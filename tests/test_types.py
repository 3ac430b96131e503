"""The basic types: traits of a model, special tokens, and sampling options."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device

from refusion_lit.data.evaluation import PromptBatch
from refusion_lit.tasks import Example
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens


@pytest.mark.parametrize(
    "traits",
    [
        ModelTraits(),
        ModelTraits(attention="bidirectional", predictions=("mask",)),
        ModelTraits(attention="block_causal", block_size=8, predictions=("mask_shifted", "next_token")),
        ModelTraits(predictions=()),
    ],
)
def test_traits_survive_json(traits: ModelTraits) -> None:
    values = json.loads(json.dumps(traits.to_dict()))
    assert ModelTraits.from_dict(values) == traits
    assert ModelTraits.from_dict({**values, "of_a_later_version": 1}) == traits


def test_a_directory_that_says_nothing_is_causal_and_unknown() -> None:
    assert ModelTraits.from_dict({}) == ModelTraits(attention="causal", block_size=None, predictions=None)


@pytest.mark.parametrize(
    "options", [{"attention": "block_causal"}, {"block_size": 4}, {"attention": "bidirectional", "block_size": 4}]
)
def test_a_block_size_goes_with_block_causal_attention(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^block_size: expected .*block_causal"):
        ModelTraits(**options)


@pytest.mark.parametrize(
    ("mask", "eos", "pad", "banned"),
    [
        (2, (1,), 0, (0, 2)),
        (2, (1,), 1, (2,)),  # padding that ends a response is drawn
        (None, (1,), 0, (0,)),
        (None, (1,), 1, ()),
        (0, (1, 5), 5, (0,)),
        (7, (1,), 7, (7,)),
    ],
)
def test_mask_and_padding_are_never_drawn(
    mask: int | None, eos: tuple[int, ...], pad: int, banned: tuple[int, ...]
) -> None:
    special = SpecialTokens(mask_token_id=mask, eos_token_ids=eos, pad_token_id=pad, vocab_size=9)
    assert special.banned_token_ids == banned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "^max_new_tokens: expected an integer of at least 1, got 0"),
        ({"max_new_tokens": -3}, "^max_new_tokens: expected an integer of at least 1, got -3"),
        ({"temperature": -0.1}, "^temperature: expected .*, got -0.1"),
        ({"temperature": 1e-40}, "^temperature: expected .*, got 1e-40"),
        ({"temperature": math.inf}, "^temperature: expected .*, got inf"),
        ({"temperature": math.nan}, "^temperature: expected .*, got nan"),
        ({"top_p": 0.0}, r"^top_p: expected a number in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"^top_p: expected a number in \(0, 1\], got 1.01"),
        ({"top_k": 0}, "^top_k: expected an integer of at least 1, got 0"),
        ({"top_k": 1.5}, "^top_k: expected an integer of at least 1, got 1.5"),
        ({"top_k": True}, "^top_k: expected an integer of at least 1, got True"),
        ({"stop": "ab"}, "^stop: expected a list of texts.*, got 'ab'"),
        ({"stop": ("a", "")}, "^stop: expected a list of texts"),
    ],
)
def test_impossible_sampling_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_greedy_sampling_keeps_the_rest() -> None:
    sampling = SamplingParams(max_new_tokens=7, temperature=0.8, top_p=0.5, top_k=3, seed=4, stop=("x",))
    greedy = sampling.greedy()
    assert greedy == SamplingParams(max_new_tokens=7, temperature=0.0, top_p=0.5, top_k=3, seed=4, stop=("x",))
    assert sampling.temperature == 0.8
    assert hash(SamplingParams(stop=["x"])) == hash(SamplingParams(stop=("x",)))  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        sampling.seed = 5  # type: ignore[misc]


def test_lightning_leaves_prompts_as_they_are() -> None:
    batch = PromptBatch([(Prompt(token_ids=(1, 2), id="a"), Example(id="a", query="q", response="r"))])
    assert move_data_to_device(batch, torch.device("meta")) is batch
