"""Writes a model in a published family's format, for programs that serve the family's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.formats import COMMON_OPTIONS, CheckpointFormat, ExportLayout
from refusion_lit.modeling.lora import merge_adapters
from refusion_lit.modeling.vocabulary import read_special_tokens
from refusion_lit.modeling.weights import published_weights
from refusion_lit.utils.files import require_empty, write_atomically
from refusion_lit.utils.require import require

_UNTRAINED = ("visible", "next_token")
"""Predictions that a family's decoder does not need."""


def check_format(backbone: Backbone, published: CheckpointFormat) -> ExportLayout:
    """Return a format's layout, after a check that the model fits the format.

    Raises:
        ValueError: If the format's classes would compute or decode the model differently.
    """
    layout = published.layout
    option = f"format {published.name}"
    assert layout is not None
    config, traits = backbone.model.config, backbone.traits
    fix = "choose another --format; hf takes every model"

    def check(name: str, expected: object, got: object, *, fits: bool) -> None:
        require(fits, option, f"{name} {expected}", got, fix)

    check("no drafter", "in the model", "a drafter", fits=backbone.drafter is None)
    bases = layout.bases or (published.base,)
    check("model_type", " or ".join(bases), config.model_type, fits=config.model_type in bases)
    check("attention", published.attention, traits.attention, fits=traits.attention == published.attention)
    needed = [prediction for prediction in published.predictions if prediction not in _UNTRAINED]
    predictions = traits.predictions or ()
    got = " and ".join(predictions) or "a model whose training is not recorded"
    check("a model that predicts", " and ".join(needed), got, fits={*needed} <= {*predictions})
    check("prompts", "in blocks of block_size", "prompts as one block", fits=not traits.prompt_is_block)
    mask = backbone.special_tokens.mask_token_id
    check("a tokenizer", "with a mask token", "none", fits=mask is not None)
    for name, allowed in layout.supported.items():
        value = getattr(config, name, allowed[0])
        check(name, " or ".join(map(repr, allowed)), value, fits=value in allowed)
    absent = [name for name, _ in backbone.model.named_parameters() if name.endswith(layout.absent_weights)]
    check("weights", f"without {' and '.join(layout.absent_weights)}", next(iter(absent), None), fits=not absent)
    if "head_dim" not in layout.options:
        size, computed = getattr(config, "head_dim", None), config.hidden_size / config.num_attention_heads
        check("head_dim", f"{computed:g}, hidden_size / num_attention_heads", size, fits=size in (None, computed))
    rope = config.rope_parameters.get("rope_type", "default")
    check("rotary positions", "without scaling", rope, fits=rope == "default")
    windows = [kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"]
    has_window = bool(windows) or bool(getattr(config, "use_sliding_window", False))
    check("attention", "without a window", "sliding windows", fits=not has_window)
    return layout


def save_published(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    published: CheckpointFormat,
    *,
    decoder: tuple[str, Mapping[str, Any]],
    entry: Mapping[str, Any],
) -> None:
    """Write a directory in a published format: config, weights, generation config and tokenizer.

    Args:
        backbone: The model; adapters are merged.
        tokenizer: Its tokenizer.
        directory: A new or empty directory.
        published: The format.
        decoder: Class name and options of the model's decoder, for the generation config.
        entry: Values for this package that the format cannot store: an unusual decoder or prompt template.

    Raises:
        ValueError: If the model does not fit the format, or the directory holds files.
    """
    layout = check_format(backbone, published)
    path = Path(directory)
    require_empty(path)
    path.mkdir(parents=True, exist_ok=True)
    model = merge_adapters(backbone.model)
    values = published_config(backbone, published, layout)
    if entry:
        values["refusion_lit"] = dict(entry)
    special = read_special_tokens(tokenizer)
    generation = model.generation_config.to_diff_dict()
    for name in ("refusion", "_from_model_config", *layout.omitted):
        generation.pop(name, None)
    generation |= {
        "eos_token_id": [*special.eos_token_ids],
        "pad_token_id": special.pad_token_id,
        "mask_token_id": special.mask_token_id,
        "transformers_version": transformers_version,
    }
    name, options = decoder
    if name == published.decoder:
        generation |= layout.generation
        for option, published_option in layout.decoder_names.items():
            value: Any = options.get(option)
            value = layout.decoder_values[option].get(value) if option in layout.decoder_values else value
            generation |= {} if value is None else {published_option: value}
    write_atomically(path / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
    write_atomically(path / "generation_config.json", json.dumps(generation, indent=2, sort_keys=True) + "\n")
    weights = published_weights(model, published)
    if model.config.tie_word_embeddings:
        weights.pop(published.published_name("lm_head.weight"), None)
    # Experts are views of stacked tensors, which cannot be saved as they are.
    whole = {
        name: weight.contiguous() if weight.untyped_storage().nbytes() == weight.nbytes else weight.clone()
        for name, weight in weights.items()
    }
    save_torch_state_dict(whole, path, metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    if layout.has_index and not index.exists():
        size = sum(weight.nbytes for weight in whole.values())
        content = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(whole), "model.safetensors")}
        write_atomically(index, json.dumps(content, indent=2) + "\n")
    tokenizer.save_pretrained(path)


def published_config(backbone: Backbone, published: CheckpointFormat, layout: ExportLayout) -> dict[str, Any]:
    """Return the contents of ``config.json``: the inverse of :meth:`CheckpointFormat.library_options`."""
    options = [*(name for name in COMMON_OPTIONS if name not in layout.omitted), *layout.options]
    values = {published.config_names.get(name, name): _read_option(backbone, name) for name in options}
    size, option = backbone.traits.block_size, published.block_size_option
    if option is not None and (option in layout.options or size != published.block_size):
        values[option] = size
    values |= {"model_type": published.model_type, "transformers_version": transformers_version}
    if layout.architecture is not None:
        values["architectures"] = [layout.architecture]
    if layout.repository is not None:
        values["auto_map"] = {name: f"{layout.repository}--{path}" for name, path in layout.classes.items()}
    fixed = {name: allowed[0] for name, allowed in published.required.items() if allowed[0] is not None}
    return {**fixed, **layout.constants, **values}


def _read_option(backbone: Backbone, name: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return an option's value by its transformers name. Some options have another place in transformers' config."""
    config, special = backbone.model.config, backbone.special_tokens
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    eos = config.eos_token_id
    computed = {
        "attention_bias": getattr(config, "attention_bias", config.model_type == "qwen2"),
        "bd_size": backbone.traits.block_size,
        "block_size": backbone.traits.block_size,
        "dtype": str(backbone.model.dtype).removeprefix("torch."),
        "embedding_size": config.vocab_size,
        "eos_token_id": eos if eos in special.eos_token_ids else special.eos_token_ids[0],
        "head_dim": head_dim,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "mask_token_id": special.mask_token_id,
        "max_window_layers": config.num_hidden_layers,
        "pad_token_id": special.pad_token_id,
        "partial_rotary_factor": share,
        "qk_norm": config.model_type == "qwen3",
        "rope_scaling": None,
        "rope_theta": rope["rope_theta"],
        "rotary_dim": int(head_dim * share),
        "torch_dtype": str(backbone.model.dtype).removeprefix("torch."),
    }
    return computed[name] if name in computed else getattr(config, name)
