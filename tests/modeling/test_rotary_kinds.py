"""Kinds of rotary positions against transformers' own classes, below and above the context of the first training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from modeling.test_backbone import build_library_model, draw_tokens, make_causal_mask
from refusion_lit.decoding import Autoregressive, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.fakes import SPECIAL, VOCAB

ORIGINAL = 32
SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN = {"rope_type": "yarn", **SCALED}
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
BANNED = [token for token in SPECIAL.banned_token_ids if token < VOCAB]

KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "yarn": ("qwen3", YARN, True),
    "yarn with an attention factor": ("qwen2", {**YARN, "attention_factor": 0.7}, True),
    "yarn with mscale": ("llama", {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6}, True),
    "yarn without truncation": ("qwen3", {**YARN, "truncate": False, "beta_fast": 9.0, "beta_slow": 0.5}, True),
    "llama3": ("llama", {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, True),
    "linear": ("qwen2", {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, True),
    "partial": ("glm", {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}, False),
    "partial, of halves": (
        "stablelm", {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}, False,
    ),
    "proportional": ("gemma4_text", PROPORTIONAL, False),
    "queries scaled by position": ("ministral3", {**YARN, "llama_4_scaling_beta": 0.1}, False),
}  # fmt: skip
"""Model type, rotary parameters, and whether the fused body knows the model."""

CASES = [
    pytest.param(name, fused, id=f"{name}-{'fused' if fused else 'transformers'}")
    for name, (_, _, is_known) in KINDS.items()
    for fused in ((True, False) if is_known else (False,))
]


def make_models(name: str, *, fused_body: bool) -> tuple[PreTrainedModel, Backbone]:
    model_type, rope, is_known = KINDS[name]
    options: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 4 * ORIGINAL}
    if model_type == "gemma4_text":
        options |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4 * ORIGINAL,
                    "global_head_dim": 24, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": VOCAB}  # fmt: skip
    if model_type == "ministral3":
        options["sliding_window"] = None
    library = build_library_model(model_type, **options)
    model = Backbone(library, ModelTraits(predictions=("next_token",)), SPECIAL, fused_body=fused_body)
    assert (model.make_fused_body() is not None) == (is_known and fused_body)
    return library, model


@torch.no_grad()
def compute_in_pieces(model: Backbone, ids: Tensor, split: int) -> Tensor:
    """Return logits of two forward passes with a KV cache."""
    rows, length = ids.shape
    positions, mask = torch.arange(length).expand(rows, length), make_causal_mask(rows, length)
    cache = model.make_cache(rows)
    logits = []
    for start, stop in ((0, split), (split, length)):
        count = stop - start
        cache.prepare(
            [*range(rows)], stop, torch.arange(rows * count), torch.arange(rows).repeat_interleave(count),
            torch.arange(start, stop).repeat(rows),
        )  # fmt: skip
        piece = slice(start, stop)
        states = model.hidden_states(ids[:, piece], positions[:, piece], mask[:, piece, :stop], cache)
        logits.append(model.logits(states))
    return torch.cat(logits, 1)


@pytest.mark.parametrize(("name", "fused_body"), CASES)
@pytest.mark.parametrize("length", [ORIGINAL // 2, 3 * ORIGINAL])
@torch.no_grad()
def test_logits_are_transformers(name: str, length: int, fused_body: bool) -> None:
    library, model = make_models(name, fused_body=fused_body)
    ids, positions = draw_tokens(2, length), torch.arange(length).expand(2, length)
    expected = library(input_ids=ids, use_cache=False).logits
    whole = model.logits(model.hidden_states(ids, positions, None))
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    pieces = compute_in_pieces(model, ids, length // 3)
    torch.testing.assert_close(pieces, expected, rtol=1e-5, atol=1e-5)


def without_kind(name: str) -> dict[str, Any]:
    """Return rotary parameters that differ from a kind's in the kind alone."""
    rope, plain = KINDS[name][1], {"rope_type": "default", "rope_theta": 10_000.0}
    if "llama_4_scaling_beta" in rope:
        return {**rope, "llama_4_scaling_beta": 0.0}
    if name == "proportional":
        return {**rope, "full_attention": {**plain, "rope_theta": 1e6}}
    return {**plain, "partial_rotary_factor": 1.0} if "partial_rotary_factor" in rope else plain


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_the_kind_changes_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison would say nothing."""
    ids = draw_tokens(1, 60)
    library, _ = make_models(name, fused_body=False)
    logits = library(input_ids=ids).logits
    monkeypatch.setitem(KINDS, name, (KINDS[name][0], without_kind(name), KINDS[name][2]))
    library, _ = make_models(name, fused_body=False)
    assert not torch.allclose(logits, library(input_ids=ids).logits, atol=1e-2)


@pytest.mark.parametrize(("name", "fused_body"), CASES)
def test_greedy_texts_are_those_of_generate_on_a_batch_with_padding_on_the_left(name: str, fused_body: bool) -> None:
    library, model = make_models(name, fused_body=fused_body)
    prompts = [tuple(draw_tokens(1, length, seed=length)[0].clamp(min=3).tolist()) for length in (2, 19, 50)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        output: Any = library.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=mask, max_new_tokens=40, do_sample=False, suppress_tokens=BANNED,
            eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
    given = [Prompt(token_ids=prompt, id=str(i)) for i, prompt in enumerate(prompts)]
    rows = decode(model, Autoregressive(), given, SamplingParams(max_new_tokens=40), batch_size=3).rows
    for row, text in zip(rows, output[:, longest:].tolist(), strict=True):
        assert row.token_ids == (text[: text.index(1) + 1] if 1 in text else text)
