# ruff: noqa: ANN401 - transformers' and peft's classes
"""Saves directories for other libraries: models with their decoders for transformers, adapters for peft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from refusion_lit.modeling.backbone import Backbone, get_body
from refusion_lit.modeling.block_drafter import FOLDER, BlockDrafter, save_block_drafter
from refusion_lit.modeling.custom_generate import write_program
from refusion_lit.modeling.drafter import FORMAT, OPTIONS_FILE, WEIGHTS_FILE, Drafter, DrafterOrigin
from refusion_lit.modeling.lora import adapts_embedding, merge_adapters, quiet_peft
from refusion_lit.modeling.prompt_code import prompt_code as prompt_code  # programs import it from here
from refusion_lit.modeling.weights import weights_digest
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.files import require_empty, write_atomically
from refusion_lit.utils.require import require

PROMPT_TEMPLATE = "prompt_template"
HAS_DRAFTER = "has_drafter"
"""Key in the config's entry ``refusion_lit`` if there is a drafter: true, or a block drafter's folder."""
PROGRAM_OPTIONS = ("slot_size", "num_serial_blocks", "slot_threshold", "token_threshold")
"""Options of :class:`~refusion_lit.decoding.ReFusion` that exported programs know."""
_KEPT_BY_PROGRAMS = ("bos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p")
"""Generation options that an export with a program keeps from its base: ids, and sampling for other programs."""


def save_model(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    prompt_template: str = "{query}",
) -> None:
    """Write a Hugging Face directory: safetensors, config with ``mask_token_id``, traits and template, tokenizer.

    Adapters are merged into the weights first. A model with a drafter is written with the drafter and its decoder. A
    model trained with the hybrid objective is written with a decoder for transformers'
    ``generate(custom_generate=...)``, which gets the options that it knows from the model's ReFusion.

    Args:
        backbone: The model.
        tokenizer: Its tokenizer.
        directory: A new or empty directory.
        prompt_template: Turns a query into a prompt if the tokenizer has no chat template.

    Raises:
        ValueError: If the directory already holds files (an old ``model.safetensors`` could be loaded instead).
    """
    path = Path(directory)
    require_empty(path)
    drafter = backbone.drafter
    model = merge_adapters(backbone.model)
    model.config.mask_token_id = backbone.special_tokens.mask_token_id
    first, *others = backbone.special_tokens.eos_token_ids
    if isinstance(drafter, Drafter) or (drafter is None and has_own_decoder(backbone.traits)):
        # The programs would refuse the base's other options, such as Qwen2.5's repetition penalty.
        kept = {name: getattr(model.generation_config, name) for name in _KEPT_BY_PROGRAMS}
        model.generation_config = GenerationConfig(**kept)
    model.generation_config.eos_token_id = [first, *others] if others else first
    stored = getattr(model.config, "refusion_lit", None) or {}
    model.config.refusion_lit = {**stored, **backbone.traits.to_dict(), PROMPT_TEMPLATE: prompt_template}
    model.config.refusion_lit.pop(HAS_DRAFTER, None)
    if isinstance(drafter, BlockDrafter):
        model.config.refusion_lit[HAS_DRAFTER] = FOLDER
        (path / FOLDER).mkdir(parents=True)
        save_block_drafter(drafter, get_body(model), path / FOLDER)
    elif drafter is not None:
        model.config.refusion_lit[HAS_DRAFTER] = True
        path.mkdir(parents=True, exist_ok=True)
        save_drafter(drafter, get_body(model), path, **vocabulary_options(backbone.special_tokens))
    elif has_own_decoder(backbone.traits):
        named = stored.get("decoder") or {}
        options = (named.get("init_args") or {}) if named.get("class_path") == "ReFusion" else {}
        known = {name: options[name] for name in PROGRAM_OPTIONS if options.get(name) is not None}
        refusion = {**vocabulary_options(backbone.special_tokens), **known}
        model.generation_config.refusion = refusion  # type: ignore[attr-defined]
        write_program("refusion", path)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def has_own_decoder(traits: ModelTraits) -> bool:
    """Return whether :func:`save_model` writes a decoder for transformers' ``generate`` for these traits."""
    return traits.attention == "causal" and {"mask", "next_token_in_slot"} <= set(traits.predictions or ())


def vocabulary_options(special: SpecialTokens) -> dict[str, Any]:
    """Return the facts about the vocabulary that an exported decoder needs. The model may have more rows."""
    unused = {"unused_token_ids": list(special.unused_token_ids)} if special.unused_token_ids else {}
    return {"vocab_size": special.vocab_size, **unused}


def save_drafter(
    drafter: Drafter, body: nn.Module, directory: Path, *, vocab_size: int, unused_token_ids: Sequence[int] = ()
) -> None:
    """Write a drafter without its model: options, weights in bfloat16, decoder, and the model's name and digest.

    Args:
        drafter: The drafter.
        body: The body of the drafter's model.
        directory: An existing directory.
        vocab_size: The tokenizer's highest id plus 1; the model may have more rows.
        unused_token_ids: Ids below ``vocab_size`` without a token.
    """
    digest = weights_digest(body.get_submodule("layers"))
    values = {"format": FORMAT, **asdict(DrafterOrigin.from_drafter(drafter)), "base_weights": digest}
    values["vocab_size"] = vocab_size
    if unused_token_ids:
        values["unused_token_ids"] = [*unused_token_ids]
    write_atomically(directory / OPTIONS_FILE, json.dumps(values, indent=1) + "\n")
    weights = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in drafter.state_dict().items()}
    save_file(weights, directory / WEIGHTS_FILE)
    write_program("families.speculative", directory)


def save_adapters(backbone: Backbone, tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
    """Write the adapters alone in peft's layout, for ``PeftModel.from_pretrained`` with the base model.

    Rows of embedding and head that the base lacks, such as a new mask token's row, become peft's trainable tokens
    (``trainable_token_indices``). The base with the adapters then has the backbone's logits. A base with fewer rows
    than tokens must be resized before peft gets it.

    Args:
        backbone: A model with unmerged adapters; they are removed from it.
        tokenizer: Its tokenizer with the mask token; saved too.
        directory: A new or empty directory.

    Raises:
        ValueError: If the model has no adapters, the adapters have no base, adapters alone cannot hold the head or the
            new rows, or the directory is not empty.
    """
    adapters = backbone.adapters
    if adapters is None:
        raise ValueError(
            "adapter_only: expected a model with low-rank adapters, got a model without adapters; export without "
            "adapter_only."
        )
    if adapters.base is None:
        raise ValueError(
            "adapter_only: expected adapters of a pretrained base model, got a base with random weights, which exist "
            "in the checkpoint alone; export without adapter_only, which merges the adapters."
        )
    path = Path(directory)
    require_empty(path)
    model: Any = backbone.model
    if adapts_embedding(model):
        fix = "export without adapter_only, which merges the adapters"
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().base_layer.weight
        got = "adapters of the embedding of a base whose head is tied to it, which peft would change too"
        require(not is_tied, "adapter_only", "a head that is not tied to the embedding", got, fix)
        got = "adapters of the embedding and rows for new tokens, which peft cannot combine"
        require(not adapters.new_token_ids, "adapter_only", "a base with a row for every token", got, fix)
    if adapters.new_token_ids:
        model = _with_token_rows(model, list(adapters.new_token_ids))
    config = model.peft_config[model.active_adapter]
    config.base_model_name_or_path = adapters.base
    config.revision = adapters.revision
    model.save_pretrained(path, save_embedding_layers=False)  # new rows are trainable tokens, not matrices
    tokenizer.save_pretrained(path)


def _with_token_rows(model: Any, token_ids: list[int]) -> Any:
    """Return a ``PeftModel`` with the same adapters and with some tokens' embedding and head rows."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config = model.peft_config[model.active_adapter]
    adapters = get_peft_model_state_dict(model, save_embedding_layers=False)
    base: Any = model.unload()
    if hasattr(base, "peft_config"):  # peft 0.18 leaves it there and then takes the base for a model with adapters
        del base.peft_config
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    if layers[0].weight is layers[1].weight:  # peft ties them too
        layers.pop()
    names = [name.rpartition(".")[2] for name, module in base.named_modules() if module in layers]
    with quiet_peft():
        extended = get_peft_model(base, replace(config, trainable_token_indices=dict.fromkeys(names, token_ids)))
    rows = get_peft_model_state_dict(extended, save_embedding_layers=False)
    set_peft_model_state_dict(extended, {**rows, **adapters})
    return extended
