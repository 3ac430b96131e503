"""Saves directories that other libraries load: whole models for transformers, adapters for peft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.modeling.backbone import Backbone, body_of
from refusion_lit.modeling.drafter import save_drafter
from refusion_lit.modeling.exporting import write_program
from refusion_lit.modeling.lora import merged, quiet_peft
from refusion_lit.types import ModelTraits
from refusion_lit.utils.files import require_empty

_TEMPLATE = "prompt_template"
HAS_DRAFTER = "has_drafter"
"""Entry of ``refusion_lit`` in the config of a directory that holds a drafter, too."""
_PROGRAM = Path(__file__).parents[1] / "refusion" / "export.py"
"""The decoder for transformers alone that a saved hybrid model holds: a file to copy, which imports nothing of ours."""
PROGRAM_OPTIONS = ("slot_size", "num_serial_blocks", "slot_threshold", "token_threshold")
"""What that decoder takes of :class:`~refusion_lit.decoding.ReFusion`'s options."""


def save_model(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    prompt_template: str = "{query}",
) -> None:
    """Write a Hugging Face directory: safetensors, config with ``mask_token_id``, traits and template, tokenizer.

    Adapters are merged into the backbone's weights first. For a model of the hybrid objective, the directory includes a
    decoder for transformers' ``generate(custom_generate=...)``, with those options of the model's own ReFusion that it
    knows; for a model with a drafter, the drafter and its
    decoder.

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
    model = merged(backbone.model)
    model.config.mask_token_id = backbone.special_tokens.mask_token_id
    first, *others = backbone.special_tokens.eos_token_ids
    model.generation_config.eos_token_id = [first, *others] if others else first
    stored = getattr(model.config, "refusion_lit", None) or {}
    model.config.refusion_lit = {**stored, **backbone.traits.to_dict(), _TEMPLATE: prompt_template}
    model.config.refusion_lit.pop(HAS_DRAFTER, None)
    if drafter is not None:
        model.config.refusion_lit[HAS_DRAFTER] = True
        path.mkdir(parents=True, exist_ok=True)
        save_drafter(drafter, body_of(model), path, vocab_size=backbone.special_tokens.vocab_size)
    elif has_own_decoder(backbone.traits):
        own = stored.get("decoder") or {}
        options = (own.get("init_args") or {}) if own.get("class_path") == "ReFusion" else {}
        known = {name: options[name] for name in PROGRAM_OPTIONS if options.get(name) is not None}
        model.generation_config.refusion = {"vocab_size": backbone.special_tokens.vocab_size, **known}
        model.generation_config._from_model_config = False  # otherwise loading derives it from the config
        write_program(_PROGRAM, path)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def has_own_decoder(traits: ModelTraits) -> bool:
    """Whether the saved directory of a model with these traits includes a decoder for transformers' ``generate``."""
    return traits.attention == "causal" and {"mask", "next_token_in_slot"} <= set(traits.predictions or ())


def stored_prompt_template(backbone: Backbone) -> str:
    """Return the prompt template in the config of the directory that a backbone was loaded from."""
    return (getattr(backbone.config, "refusion_lit", None) or {}).get(_TEMPLATE, "{query}")


def save_adapters(backbone: Backbone, tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
    """Write the adapters alone in peft's layout, for ``PeftModel.from_pretrained`` with the base model.

    Rows of embedding and head that the base lacks, such as a new mask token's, are written as peft's trainable tokens
    (``trainable_token_indices``): the base with these adapters has the backbone's logits. A base with fewer rows than
    tokens must be resized before it is given to peft.

    Args:
        backbone: A model with unmerged adapters; they are removed from it.
        tokenizer: Its tokenizer with the mask token; saved too.
        directory: A new or empty directory.

    Raises:
        ValueError: If there are no adapters, they have no base, or the directory holds files already.
    """
    adapters = backbone.adapters
    if adapters is None:
        raise ValueError(
            "adapter_only: expected a model with low-rank adapters, got one without; export it without adapter_only."
        )
    if adapters.base is None:
        raise ValueError(
            "adapter_only: expected adapters of a base model with weights of its own, got a base with random weights, "
            "which exist in the checkpoint alone; export it without adapter_only, which merges the adapters."
        )
    path = Path(directory)
    require_empty(path)
    model: Any = backbone.model
    if adapters.new_token_ids:
        model = _with_token_rows(model, list(adapters.new_token_ids))
    config = model.peft_config[model.active_adapter]
    config.base_model_name_or_path = adapters.base
    config.revision = adapters.revision
    model.save_pretrained(path, save_embedding_layers=False)  # whole matrices are not needed, see above
    tokenizer.save_pretrained(path)


def _with_token_rows(model: Any, token_ids: list[int]) -> Any:  # noqa: ANN401 - peft's class
    """Return a ``PeftModel`` with the same adapters that also holds some tokens' rows of embedding and head."""
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
