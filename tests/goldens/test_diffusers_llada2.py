"""diffusers' ``LLaDA2Pipeline`` and ``TokenEditing`` agree on a random model; ``nox -s parity`` installs diffusers."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import refusion_lit
from refusion_lit.decoding import TokenEditing, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.types import Prompt, SamplingParams
from support.published import MODELS

diffusers = pytest.importorskip("diffusers")
MAX_NEW_TOKENS = 21
PROMPTS = [(5,), (3, 4, 5), tuple(range(3, 11)), tuple(range(3, 13)), (7,) * 17]
SETTINGS: list[dict[str, Any]] = [
    {"block_length": 8, "threshold": 0.3, "editing_threshold": 0.2, "eos_early_stop": False},
    {"block_length": 8, "threshold": 0.9, "editing_threshold": None, "eos_early_stop": False},
    {"block_length": 4, "threshold": 0.5, "editing_threshold": 0.3, "eos_early_stop": True},
    {"block_length": 8, "threshold": 0.2, "editing_threshold": 0.1, "max_post_steps": 3, "eos_early_stop": True},
]


@cache
def make_backbone(block_size: int) -> Backbone:
    """Return LLaDA2's architecture with random weights, which never prefers a token that no decoder draws."""
    blocks = BackboneConfig(source="x", attention="block_causal", block_size=block_size)
    backbone = refusion_lit.load(MODELS["llada2-tiny"], dtype="float64", overrides=blocks).backbone
    generator = torch.Generator().manual_seed(block_size)
    with torch.no_grad():
        for weight in backbone.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.15, generator=generator)
        backbone.head.weight.mul_(3)
    special = backbone.special_tokens
    banned = [*special.banned_token_ids, *range(special.vocab_size, backbone.head.out_features)]
    penalty = torch.zeros(backbone.head.out_features, dtype=torch.float64)
    penalty[banned] = -60

    def add_penalty(_module: Any, _inputs: Any, logits: Any) -> Tensor:
        return logits + penalty

    backbone.head.register_forward_hook(add_penalty)
    return backbone


class BlockCausal:
    """A model as the pipeline calls it, with the block-causal mask that users must give it."""

    def __init__(self, backbone: Backbone, block_size: int) -> None:
        self.backbone = backbone
        self.block_size = block_size
        self.num_calls = 0

    def __call__(self, ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        self.num_calls += 1
        blocks = position_ids // self.block_size
        visible = blocks[:, :, None] >= blocks[:, None]
        hidden = self.backbone.hidden_states(ids, position_ids, visible)
        return SimpleNamespace(logits=self.backbone.logits(hidden))


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@torch.no_grad()
def test_texts_and_forwards(setting: int) -> None:
    options = SETTINGS[setting]
    size = options["block_length"]
    backbone = make_backbone(size)
    special = backbone.special_tokens
    decoder = TokenEditing(
        block_size=size, mask_threshold=options["threshold"], edit_threshold=options["editing_threshold"] or 1.0,
        max_post_steps=options.get("max_post_steps", 16) + 1, num_steps=size, stop_at_eos=options["eos_early_stop"],
        stop_in_block=options["eos_early_stop"],
    )  # fmt: skip
    prompts = [Prompt(token_ids=tokens, id=str(i)) for i, tokens in enumerate(PROMPTS)]
    rows = decode(backbone, decoder, prompts, SamplingParams(max_new_tokens=MAX_NEW_TOKENS), batch_size=2).rows
    [eos] = special.eos_token_ids[:1]
    for tokens, row in zip(PROMPTS, rows, strict=True):
        model = BlockCausal(backbone, size)
        pipeline = diffusers.LLaDA2Pipeline(model=model, scheduler=diffusers.BlockRefinementScheduler())
        pipeline.set_progress_bar_config(disable=True)
        output = pipeline(
            input_ids=torch.tensor([tokens]), gen_length=MAX_NEW_TOKENS, num_inference_steps=size, output_type="seq",
            sampling_method="greedy", mask_token_id=special.mask_token_id, eos_token_id=eos, **options,
        )  # fmt: skip
        text = output.sequences[0].tolist()
        assert row.token_ids == (text[: text.index(eos) + 1] if eos in text else text)
        if options["eos_early_stop"]:  # the pipeline makes a further block if EOS was written before tokens on its left
            assert row.num_forwards <= model.num_calls
        else:
            assert row.num_forwards == model.num_calls
