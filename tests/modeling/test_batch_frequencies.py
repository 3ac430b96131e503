"""No text changes with its neighbours in a batch: rotary frequencies that do are refused or frozen."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import refusion_lit
from refusion_lit import BackboneConfig, CharacterTokenizer
from refusion_lit.decoding import Autoregressive, decode
from refusion_lit.types import Prompt, SamplingParams
from support.tiny import make_base

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def source(path: Path, rope: dict[str, Any], context: int, model_type: str = "llama") -> Path:
    make_base(path, "abcdefghijklmnopqrstuvwxyz0123456789")
    options = {**SIZES, "vocab_size": 40, "max_position_embeddings": context, "rope_parameters": deepcopy(rope)}
    if model_type == "phi3":
        options["original_max_position_embeddings"] = 64
    config = AutoConfig.for_model(model_type, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3"])
def test_factors_that_change_with_the_batch_are_refused_before_weights_are_read(
    tmp_path: Path, model_type: str
) -> None:
    folder = source(tmp_path, LONG, 256, model_type)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"rope_parameters.*longrope.*short_factor and long_factor equal"):
        refusion_lit.load(folder)


def test_training_refuses_them_too() -> None:
    config = {"model_type": "llama", **SIZES, "max_position_embeddings": 256, "rope_parameters": deepcopy(LONG)}
    tokenizer = CharacterTokenizer(characters="ab").build(None)
    with pytest.raises(ValueError, match=r"backbone\.config: rope_parameters.*longrope"):
        BackboneConfig(config=config).build(tokenizer)


@pytest.mark.parametrize(
    ("rope", "context"),
    [({**LONG, "long_factor": LONG["short_factor"]}, 256), (LONG, 64), (DYNAMIC, 64)],
    ids=["equal factors", "short context", "dynamic"],
)
def test_harmless_frequencies_give_each_prompt_its_own_text(tmp_path: Path, rope: dict[str, Any], context: int) -> None:
    folder = source(tmp_path, rope, context)
    model = refusion_lit.load(folder, dtype="float64")
    random = torch.Generator().manual_seed(7)
    sampling = SamplingParams(max_new_tokens=12)
    for _ in range(3):
        short, long = (torch.randint(2, 38, (size,), generator=random).tolist() for size in (10, context - 12))
        prompts = [Prompt(token_ids=tuple(ids), id=str(i)) for i, ids in enumerate((short, long))]
        alone = [decode(model.backbone, Autoregressive(), [prompt], sampling).rows[0].token_ids for prompt in prompts]
        together = decode(model.backbone, Autoregressive(), prompts, sampling, batch_size=2).rows
        assert [row.token_ids for row in together] == alone
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        logits = base(torch.tensor([short])).logits[0]
        positions = torch.arange(len(short))[None]
        ours = model.backbone.logits(model.backbone.hidden_states(torch.tensor([short]), positions, None))[0]
        torch.testing.assert_close(ours[:, :38], logits[:, :38])


def test_masks_beyond_the_context_do_not_change_the_frequencies(tmp_path: Path) -> None:
    model = refusion_lit.load(source(tmp_path, DYNAMIC, 64), dtype="float64").backbone
    ids = torch.tensor([[5] * 20, [6] * 20])
    near = torch.arange(20).expand(2, -1)
    far = torch.stack((near[0], near[0] + 200))
    together = model.hidden_states(ids, far, None)[0]
    torch.testing.assert_close(together, model.hidden_states(ids, near, None)[0])
