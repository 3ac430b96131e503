"""Measures memory and time of loading random models of three sizes, up to about 1 GB, in the published layouts.

Each model, in bfloat16, is stored in four shards and loaded in a process of its own. The figures are that process's
resident memory at its peak, less what it had before loading, over the size of the weights, and the seconds until all
weights have been read. The files were just written, so they are in the page cache.

usage: python -m benchmarks.load_memory
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import alone, status_bytes, write
from jsonargparse import auto_cli
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import refusion_lit
from refusion_lit.modeling.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from refusion_lit.modeling.formats import FORMATS, CheckpointFormat
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.weights import published_weights

_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
_EXPERTS = {"moe_intermediate_size": 1024, "num_experts_per_tok": 2}
_NUM_EXPERTS = 6
_NUM_SHARDS = 4
_NUM_LAYERS = {"small": 3, "medium": 6, "large": 9}


def make_weights(layout: CheckpointFormat, num_layers: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the published config and random weights of a model of a layout."""
    if layout.base == "diffusion_gemma":
        return _diffusion_gemma(num_layers)
    config = AutoConfig.for_model(layout.base, **_SIZES, num_hidden_layers=num_layers)
    if hasattr(config, "num_local_experts"):
        config.update({**_EXPERTS, "num_local_experts": _NUM_EXPERTS, "use_qk_norm": True})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = _random(published_weights(model, layout))
    options = json.loads(config.to_json_string(use_diff=False))
    theirs = {layout.config_names.get(name, name): value for name, value in options.items()}
    fixed = {name: values[0] for name, values in layout.required.items()}
    fixed["qk_norm"] = layout.base == "qwen3"  # by which WeDLM's config tells Qwen3 from Qwen2
    return {**theirs, **fixed, "model_type": layout.model_type or layout.base}, weights


def _diffusion_gemma(num_layers: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and weights of a DiffusionGemma without vision tower; a third of its layers have full attention."""
    text = {
        **_SIZES,
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention"] * (num_layers - num_layers // 3) + ["full_attention"] * (num_layers // 3),
        "head_dim": 128,
        "num_experts": _NUM_EXPERTS,
        "top_k_experts": _EXPERTS["num_experts_per_tok"],
        "moe_intermediate_size": _EXPERTS["moe_intermediate_size"],
        "tie_word_embeddings": True,
    }
    vision = {"model_type": "gemma4_vision", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}  # fmt: skip
    config: Any = AutoConfig.for_model("diffusion_gemma", text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=torch.bfloat16)
    tied = model.all_tied_weights_keys
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    return json.loads(config.to_json_string(use_diff=False)), _random(weights)


def _random(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(old.shape, dtype=old.dtype).normal_(std=0.02) for name, old in weights.items()}


def save(layout: CheckpointFormat, directory: Path, num_layers: int) -> int:
    """Write a model in a layout; return the size of its weights in bytes."""
    config, weights = make_weights(layout, num_layers)
    words = ["<|endoftext|>", "<|im_end|>", *(layout.mask_tokens[:1] or ("<|mask|>",)), "a"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": words[0], "eos_token": words[1], "mask_token": words[2]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({**config, "mask_token_id": 2, "eos_token_id": 1}))
    names = sorted(weights)
    files = {f"model-{i + 1:05d}-of-{_NUM_SHARDS:05d}.safetensors": names[i::_NUM_SHARDS] for i in range(_NUM_SHARDS)}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def load(directory: str, layout: str) -> dict[str, float]:
    """Load a model and use all weights; return seconds, and resident memory before, at the peak and after, in bytes."""
    before, started = status_bytes("VmRSS"), time.perf_counter()
    overrides = BackboneConfig(source="x", checkpoint_format=layout)
    model = refusion_lit.load(directory, dtype="bfloat16", overrides=overrides)
    with torch.no_grad():
        total = sum(float(weight.sum()) for weight in model.backbone.parameters())  # reads every page
    assert total == total
    seconds = time.perf_counter() - started
    return {"before": before, "peak": status_bytes("VmHWM"), "after": status_bytes("VmRSS"), "seconds": seconds}


def main(output: str | None = None) -> None:
    """Measure all layouts.

    Args:
        output: Where to write the JSON.
    """
    started, layouts = time.perf_counter(), {}
    for name, layout in FORMATS.items():
        layouts[name] = {}
        for size, num_layers in _NUM_LAYERS.items():
            with tempfile.TemporaryDirectory() as folder:
                num_bytes = save(layout, Path(folder), num_layers)
                memory = alone("load_memory", "load", directory=folder, layout=name)
            ratio = (memory["peak"] - memory["before"]) / num_bytes
            seconds = round(memory["seconds"], 3)
            layouts[name][size] = {
                "gigabytes": round(num_bytes / 1e9, 3), "peak_over_weights": round(ratio, 3), "seconds": seconds,
            }  # fmt: skip
            print(f"{name}: {num_bytes / 1e9:.2f} GB of weights, peak {ratio:.2f} times, {seconds} s", flush=True)
    config = {"sizes": _SIZES, "num_layers": _NUM_LAYERS, "num_shards": _NUM_SHARDS, "dtype": "bfloat16"}
    write("load_memory", config, {"layouts": layouts}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
