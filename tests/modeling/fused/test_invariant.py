"""With ``batch_invariant``, a token's logits are equal to the last bit in all batches and all cuts of its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import refusion_lit
from refusion_lit.decoding import Autoregressive, Decoder, LLaDA, ReFusion
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.types import ModelTraits
from support.example_counts import examples
from support.fakes import SPECIAL, VOCAB

ADDITIONS = Path(__file__).parents[2] / "goldens" / "models"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip
TYPES = (torch.float32, torch.bfloat16)


def backbone(model_type: str, dtype: torch.dtype, **sizes: int) -> Backbone:
    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    return Backbone(model, ModelTraits(), SPECIAL, batch_invariant=True)


@torch.no_grad()
def feed_in_parts(model: Backbone, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return the logits (row, token, vocabulary) of texts.

    Args:
        model: The model.
        ids: Token ids (row, token).
        lengths: Numbers of tokens that the forward passes compute, one after another, over a KV cache.
    """
    num_rows, total = ids.shape
    cache, logits, start = model.make_cache(num_rows), [], 0
    for length in lengths:
        end = min(start + length, total)
        positions = torch.arange(start, end).expand(num_rows, -1)
        index = torch.arange(num_rows).repeat_interleave(end - start)
        cache.prepare(list(range(num_rows)), end, None, index, positions.flatten())
        mask = (torch.arange(end) <= positions[..., None]).contiguous()
        logits.append(model.logits(model.hidden_states(ids[:, start:end], positions, mask, cache)))
        start = end
        if start == total:
            break
    return torch.cat(logits, 1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@settings(max_examples=examples(16))
@given(lengths=st.lists(st.integers(1, 30), min_size=30, max_size=30), row=st.integers(0, 3))
def test_any_cut_and_batch_gives_the_same_bits(
    model_type: str, dtype: torch.dtype, lengths: list[int], row: int
) -> None:
    model = backbone(model_type, dtype)
    ids = torch.randint(0, VOCAB, (4, 30), generator=torch.Generator().manual_seed(1))
    at_once = feed_in_parts(model, ids, [30])
    assert torch.equal(feed_in_parts(model, ids, lengths), at_once)
    assert torch.equal(feed_in_parts(model, ids[row : row + 1], lengths), at_once[row : row + 1])
    with torch.no_grad():  # without a cache, and with more text after it
        longer = torch.cat((ids[row : row + 1], ids[:1, :17]), 1)
        hidden = model.hidden_states(longer, torch.arange(47)[None], None)
    assert torch.equal(model.logits(hidden[:, :30]), at_once[row : row + 1])


@pytest.mark.parametrize("dtype", TYPES)
def test_texts_of_more_than_512_tokens_give_the_same_bits(dtype: torch.dtype) -> None:
    model = backbone("qwen3", dtype)
    ids = torch.randint(0, VOCAB, (1, 600), generator=torch.Generator().manual_seed(1))
    assert torch.equal(feed_in_parts(model, ids, [500, *[7] * 20]), feed_in_parts(model, ids, [600]))


def test_causal_attention_given_as_ranges_gives_the_same_bits() -> None:
    model = backbone("qwen3", torch.float32)
    ids, ends = torch.randint(0, VOCAB, (1, 300), generator=torch.Generator().manual_seed(1)), torch.arange(1, 301)
    ranges = torch.stack((torch.zeros_like(ends), ends), -1)[None, :, None]
    with torch.no_grad():
        causal, ranged = (model.hidden_states(ids, ends[None] - 1, attention) for attention in (None, ranges))
    assert torch.equal(causal, ranged)


@torch.no_grad()
def test_autocast_is_refused() -> None:
    model, ids = backbone("qwen3", torch.float32), torch.zeros(1, 3, dtype=torch.long)
    refused = pytest.raises(ValueError, match="batch_invariant: expected decoding without autocast")
    with refused, torch.autocast("cpu", torch.bfloat16):
        model.hidden_states(ids, torch.arange(3)[None], None)


def test_transformers_computes_the_same_up_to_rounding() -> None:
    model = backbone("qwen3", torch.float64)
    ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.model(ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(feed_in_parts(model, ids, [9, 4, 17]), expected)


CASES = [
    ("additions-clean", "causal", Autoregressive()),
    ("additions-mid", "causal", ReFusion(slot_size=4)),
    ("additions-bidirectional", "bidirectional", LLaDA(steps=8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attention", "decoder"), CASES)
def test_bfloat16_rows_get_the_probabilities_that_they_get_alone(name: str, attention: Any, decoder: Decoder) -> None:
    overrides = BackboneConfig(source=str(ADDITIONS / name), attention=attention, batch_invariant=True)
    model = refusion_lit.load(ADDITIONS / name, dtype="bfloat16", overrides=overrides)
    prompts = [f"{a}+{a + 1},{a}+1,9+{a}>"[a % 7 :] for a in range(7, 90, 20)]  # five prompts of different lengths
    together = model.generate(prompts, decoder=decoder, max_new_tokens=24, batch_size=5, trace=True)
    alone = [model.generate([prompt], decoder=decoder, max_new_tokens=24, trace=True)[0] for prompt in prompts]
    assert [row.trace for row in together] == [row.trace for row in alone]


def test_sizes_options_and_devices_that_cannot_be_invariant_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_invariant: expected .* multiples of 32"):
        backbone("qwen3", torch.float32, intermediate_size=100)
    model = backbone("qwen3", torch.float32)
    with pytest.raises(ValueError, match=r"batch_invariant: expected .* fused_body: true"):
        Backbone(model.model, ModelTraits(), SPECIAL, batch_invariant=True, fused_body=False)
    with pytest.raises(ValueError, match="batch_invariant: expected a model on the CPU"):
        model.to("meta").make_fused_body()
