"""Builds transformers configs, from a model type or from a ``config.json``, and checks their options.

Models that the backbone would silently compute wrongly are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from refusion_lit.modeling.formats import FORMATS, CheckpointFormat
from refusion_lit.modeling.vocabulary import vocabulary_size
from refusion_lit.types import ModelTraits
from refusion_lit.utils.errors import error_reason, last_line
from refusion_lit.utils.require import OptionError, require, require_at_least, require_choice, require_range

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_NUM_TAKEN = ("num_experts_per_tok", "top_k_experts")
"""Possible names of two options: the number of experts, and the number used per token."""
_NUM_LAYERS = ("num_hidden_layers", "n_layers")
_MAX_LAYERS = 10_000
_ROTARY_RANGES = dict.fromkeys(
    (
        "rope_theta", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "(0, inf)",
) | {"factor": "[1, inf)", "partial_rotary_factor": "(0, 1]"}  # fmt: skip
"""Intervals of rotary options."""
_RANGES: dict[str, int | str] = {
    **dict.fromkeys(_SIZES, 1),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), "[0, inf)"),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "routed_scaling_factor"), "(0, inf)"),
    "initializer_range": "[0, inf)",
    "attention_dropout": "[0, 1]",
}
"""Minimum or interval of the options that are numbers in every architecture."""
_SWITCHES = ("attention_bias", "mlp_bias", "qk_norm", "tie_word_embeddings", "use_qk_norm", "use_sliding_window")
"""The options that are true or false in every architecture."""
_WITH_PARTIAL_ROTARY = ("glm4_moe",)
"""Architectures of published formats that may rotate a part of a head."""
_FETCH = "fetch config.json again"
_SUPPORTED = "use a model such as Llama, Qwen2 or Qwen3"


def new_config(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:  # noqa: ANN401 - one class per architecture
    """Build a config from options. Vocabulary size and special ids default to the tokenizer's.

    Args:
        options: The config's options, ``model_type`` among them.
        tokenizer: Gives the defaults.

    Raises:
        ValueError: If transformers does not know the model type, or an option is misspelt.
    """
    _check_option_names(options)
    defaults = {
        "vocab_size": vocabulary_size(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    values = defaults | dict(options)
    if isinstance(values.get("text_config"), Mapping):  # a config of several models, such as DiffusionGemma's
        values["text_config"] = defaults | dict(values["text_config"])
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:  # transformers' checks raise errors of their own
        got = last_line(error)
        raise ValueError(f"backbone.config: expected options that fit together, got {got}; drop one.") from error
    _check_values(config, "backbone.config")
    return config


def check_num_layers(values: Mapping[str, Any], option: str) -> None:
    """Refuse more layers than any model has, because transformers' configs make lists of that length.

    Args:
        values: Contents of ``config.json``.
        option: What named the config, for the message.

    Raises:
        ValueError: Naming the number of layers.
    """
    text = values.get("text_config")
    for name in _NUM_LAYERS:
        num_layers = (text if isinstance(text, Mapping) else values).get(name)
        fits = not isinstance(num_layers, int) or num_layers <= _MAX_LAYERS
        require(fits, f"{option}: {name}", f"at most {_MAX_LAYERS}", num_layers, _FETCH)


def load_config(
    source: str,
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    published: CheckpointFormat | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:  # noqa: ANN401 - one class per architecture
    """Build the transformers config for a directory or hub id from the contents of its ``config.json``.

    Args:
        source: The directory or hub id.
        values: Contents of ``config.json``; empty if there is none.
        overrides: Options to replace.
        published: The checkpoint's published format; ``None`` for transformers' format.
        revision: Pinned revision of a hub id.
        trust_remote_code: Allow a source without a known format to run its Python code.

    Raises:
        ValueError: If the config cannot be built, or lacks an option in ``overrides``.
    """
    if not values and (Path(source) / "adapter_config.json").is_file():
        raise ValueError(
            f"backbone.source: expected a model, got adapters alone in {source!r}. Load them with peft, or export "
            "the checkpoint again without --adapter_only."
        )
    quantised = values.get("quantization_config")
    if quantised is not None:
        is_named = isinstance(quantised, Mapping)
        method = (quantised.get("quant_method") or quantised.get("quant_algo")) if is_named else None
        got, fix = method or quantised, "load the checkpoint that was quantised"
        require(False, "backbone.source: quantization_config", "weights that are not quantised", got, fix)
    check_num_layers(values, f"backbone.source: {source}")
    if published is not None:
        return _convert_published(published, values, overrides)
    model_type: Any = values.get("model_type")
    # transformers gives Mistral's configs with layer types to this architecture, too.
    model_type = "ministral" if model_type == "mistral" and "layer_types" in values else model_type
    options = {"return_unused_kwargs": True, **overrides}
    has_code = "AutoConfig" in (values.get("auto_map") or {})
    try:
        if trust_remote_code and has_code:  # transformers reads the file again, to find the class
            config, unknown = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=True, **options)
        else:
            cls = CONFIG_MAPPING[model_type]
            stored = {**deepcopy(dict(values)), "model_type": model_type, "name_or_path": source}
            config, unknown = cls.from_dict(stored, **options)
    except Exception as error:  # transformers' checks raise errors of their own
        if model_type not in CONFIG_MAPPING:
            known = ", ".join(f"{entry.name} ({entry.family})" for entry in FORMATS.values())
            raise ValueError(
                f"backbone.source: expected an architecture of transformers or one of the formats "
                f"{known}, got model_type {model_type!r}"
                f"{' in Python code that comes with' if has_code else ' in'} {source!r}. "
                f"{'Set trust_remote_code: true if you trust its authors.' if has_code else 'Check the directory.'}"
            ) from error
        raise ValueError(
            f"backbone.source: expected a config of a {model_type} model in {source!r}, got one that cannot be read "
            f"({error_reason(error) if isinstance(error, OSError | ValueError) else last_line(error)}); correct "
            f"{'config.json' if not overrides else 'config.json or backbone.config'}, or fetch config.json again."
        ) from error
    for name in unknown:
        raise _unknown_option(name, config)
    _check_rope(config, overrides)
    _check_values(config, f"backbone.source: {source}")
    return config


def _convert_published(published: CheckpointFormat, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:  # noqa: ANN401 - one class per architecture
    """Return transformers' config for a published checkpoint's config."""
    reads_text = published.base == "diffusion_gemma" or values.get("vision_config") is None
    expected = f"none in the config of a {published.name} checkpoint, which reads text only"
    require(reads_text, "backbone.source: vision_config", expected, values.get("vision_config"), "load a text model")
    try:
        config = AutoConfig.for_model(**published.library_options(values))
        for name, value in overrides.items():
            if not hasattr(config, name):
                raise _unknown_option(name, config)
            setattr(config, name, value)
    except Exception as error:  # transformers' checks raise their own errors, for instance for an explicit null
        if isinstance(error, OptionError) or str(error).startswith("backbone."):  # ours, which names the option
            raise
        raise ValueError(
            f"backbone.source: expected a complete config of a {published.name} checkpoint, got one that cannot be "
            f"converted ({type(error).__name__}: {last_line(error)}); fetch config.json again."
        ) from error
    _check_rope(config, overrides)
    _check_values(config, "backbone.source")
    _check_partial_rotary(published, config.get_text_config())
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name in sorted({"block_size", "canvas_length", published.block_size_option or "block_size"}):
        size = values.get(name)
        fits = not isinstance(size, int) or context is None or size <= context
        expected = f"at most max_position_embeddings, which is {context}"
        require(fits, f"backbone.source: {name}", expected, size, "fetch config.json again")
    return config


def _check_partial_rotary(published: CheckpointFormat, config: Any) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse rotary positions on a part of a head if the architecture rotates whole heads."""
    if published.base in _WITH_PARTIAL_ROTARY:
        return
    rope = getattr(config, "rope_parameters", None) or {}
    for group in [rope, *(group for group in rope.values() if isinstance(group, Mapping))]:
        share = group.get("partial_rotary_factor")
        fits = share in (None, 1) or group.get("rope_type") == "proportional"
        expected = f"1 in the config of a {published.name} checkpoint"
        require(fits, "backbone.source: partial_rotary_factor", expected, share, _FETCH)


def read_traits(entry: Any, source: str | None) -> ModelTraits:  # noqa: ANN401 - any JSON value
    """Return what a model was trained to do.

    Args:
        entry: The entry ``refusion_lit`` of the model's config.
        source: The model's directory or hub id, for messages.

    Raises:
        ValueError: If the entry is malformed.
    """
    try:
        require(isinstance(entry, Mapping), "refusion_lit", "a mapping of traits", entry, "remove it")
        return ModelTraits.from_dict(entry)
    except (ValueError, TypeError) as error:
        reason = error_reason(error).removesuffix(".")
        raise ValueError(
            f"backbone.source: refusion_lit in the config of {source} cannot be read ({reason}); correct or remove it."
        ) from error


def _check_values(config: Any, where: str) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse impossible options and unsupported models before weights are read."""
    config = config.get_text_config()
    check_attention(config)
    # If layers differ, a config raises an error when a value is read without naming the layer.
    for layer in config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,):
        _check_sizes(layer, where)
    _check_experts(config, where)
    _check_rotary(config, where)
    for name in ("hidden_act", "hidden_activation"):
        value = getattr(config, name, None)
        is_known = not isinstance(value, str) or value in ACT2FN or not _is_from_transformers(config)
        require(is_known, f"{where}: {name}", "an activation that transformers knows", value, _FETCH)
    window = sliding_window(config)
    knows_windows = any(hasattr(type(config), name) for name in ("sliding_window", "layer_types"))
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if window is not None or (knows_windows and slides):
        require_at_least(f"{where}: sliding_window", window, 1)


def _check_sizes(config: Any, where: str) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse invalid sizes and numbers; not every architecture has all these options."""
    for name, limit in _RANGES.items():
        if getattr(config, name, None) is not None:
            require_range(f"{where}: {name}", getattr(config, name), limit)
    for name in _SWITCHES:
        value = getattr(config, name, None)
        require(value is None or isinstance(value, bool), f"{where}: {name}", "true or false", value, _FETCH)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if heads and groups:
        expected = f"a multiple of num_key_value_heads, which is {groups}"
        fix = f"use {groups * max(1, heads // groups)}, say"
        require(heads % groups == 0, f"{where}: num_attention_heads", expected, heads, fix)
    if heads and not getattr(config, "head_dim", None):
        expected = f"a multiple of num_attention_heads, which is {heads}"
        require(config.hidden_size % heads == 0, f"{where}: hidden_size", expected, config.hidden_size, "set head_dim")


def _check_experts(config: Any, where: str) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse numbers of experts from which a router cannot choose. A model without experts may have zeros."""
    most = next((name for name in _NUM_EXPERTS if getattr(config, name, None) is not None), None)
    taken = next((name for name in _NUM_TAKEN if getattr(config, name, None) is not None), None)
    if most is None or taken is None:
        return
    num_experts, num_taken = getattr(config, most), getattr(config, taken)
    if num_experts == num_taken == 0:
        return
    require_at_least(f"{where}: {most}", num_experts, 1)
    require_at_least(f"{where}: {taken}", num_taken, 1)
    expected = f"at most {most}, which is {num_experts}"
    require(num_taken <= num_experts, f"{where}: {taken}", expected, num_taken, _FETCH)


def _is_from_transformers(config: Any) -> bool:  # noqa: ANN401 - one class per architecture
    """Return whether a config's class belongs to transformers; a source's Python code may know other names."""
    return type(config).__module__.startswith("transformers.")


def _check_rope(config: Any, overrides: Mapping[str, Any]) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse an override without type or base of rotary positions, because it replaces all rotary options."""
    for name in ("rope_parameters", "rope_scaling"):  # transformers takes the second as another name of the first
        if name in overrides:
            rope = config.rope_parameters
            is_complete = isinstance(rope, Mapping) and all(
                rope.get(key) is not None for key in ("rope_type", "rope_theta")
            )
            fix = "add what is missing: the override replaces all rotary options of the source"
            require(is_complete, f"backbone.config.{name}", "rope_type and rope_theta", overrides[name], fix)


def _check_rotary(config: Any, where: str) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse rotary options that are no numbers, or that make frequencies depend on the batch (LongRoPE).

    LongRoPE is harmless if its factors are equal, or if the context never reaches the long factors.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    groups = [rope, *(group for group in rope.values() if isinstance(group, Mapping))]  # by type of layer, in some
    for group in groups:
        for name, interval in _ROTARY_RANGES.items():
            if group.get(name) is not None:
                # Nemotron-Labs-Diffusion 3B has a quarter of YaRN's original context, and the factor 0.25.
                is_yarn_factor = name == "factor" and group.get("rope_type") == "yarn"
                require_range(f"{where}: {name}", group[name], "(0, inf)" if is_yarn_factor else interval)
        if "rope_type" in group and _is_from_transformers(config):
            require_choice(f"{where}: rope_type", group["rope_type"], ("default", *ROPE_INIT_FUNCTIONS))
        if group.get("rope_type") != "longrope" or group.get("short_factor") == group.get("long_factor"):
            continue
        original = group.get("original_max_position_embeddings")
        context = getattr(config, "max_position_embeddings", None)
        is_short = original is not None and context is not None and context <= original
        expected = "frequencies that do not depend on the other texts of a batch"
        got = f"longrope, whose factors change for the whole batch beyond {original} tokens"
        fix = "override backbone.config.rope_parameters with short_factor and long_factor equal (the long factors for "
        fix += f"texts beyond {original} tokens)"
        require(is_short, f"{where}: rope_parameters", expected, got, fix)


def freeze_frequencies(body: nn.Module) -> None:
    """Keep rotary frequencies independent of the longest text in a batch.

    Within the model's context, no frequency changes anyway. Masks beyond the context (a last block or slot) would
    change the whole batch's frequencies.
    """
    changing = ("dynamic", "longrope")  # the types of transformers' ``dynamic_rope_update``
    module: Any
    for module in body.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in changing:
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {name: "default" if value in changing else value for name, value in kind.items()}


def _check_option_names(options: Mapping[str, Any]) -> None:
    """Refuse an unknown model type, and misspelt options, which transformers would store and never use.

    Names that resemble no option of the architecture pass, because some options have further names. Configs that
    transformers wrote, perhaps in another version, pass, too.

    Raises:
        ValueError: Naming the most similar option.
    """
    model_type = options["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; take one such as 'qwen3' or 'llama'."
        raise ValueError(f"backbone.config.model_type: expected one that transformers knows, got {model_type!r}{hint}")
    if "transformers_version" in options:
        return
    config = CONFIG_MAPPING[model_type]()
    for name in options:
        is_token = name.endswith("_token_id")  # mask_token_id resembles other ids' names
        if not hasattr(config, name) and not is_token and get_close_matches(name, config.to_dict(), n=1, cutoff=0.8):
            raise _unknown_option(name, config)


def _unknown_option(name: str, config: Any) -> ValueError:  # noqa: ANN401 - one class per architecture
    near = get_close_matches(name, config.to_dict(), n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    if name == "rope_theta" and hasattr(config, "rope_parameters"):
        hint = " of its own; set it in rope_parameters, as in {rope_type: default, rope_theta: 10000.0}."
    return ValueError(f"backbone.config: {type(config).__name__} has no option {name}{hint}")


def check_supported(model: Any, body: nn.Module) -> None:  # noqa: ANN401 - a transformers model, or peft's wrapper
    """Refuse models that :class:`~refusion_lit.modeling.backbone.Backbone` would compute wrongly.

    Args:
        model: The model.
        body: The model's transformer without the head.

    Raises:
        ValueError: With the reason.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"backbone: {name} has no plain linear head (found {type(head).__name__}); {_SUPPORTED}.")
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    for part, module in whole.named_children():
        is_known = module is head or body in module.modules() or next(module.parameters(), None) is None
        if not is_known:  # such as the layers between BERT's body and head
            raise ValueError(f"backbone: {name} has layers besides body and linear head ({part}); {_SUPPORTED}.")
    taken = inspect.signature(body.forward).parameters
    for option in ("position ids", "past key values"):
        if option.replace(" ", "_") not in taken:
            raise ValueError(f"backbone: {name} takes no {option}, which parallel decoding needs; {_SUPPORTED}.")
    check_attention(config)


def check_attention(config: Any) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse attention that parallel decoding's masks and KV cache would change.

    Args:
        config: The config of a text model.

    Raises:
        ValueError: With the reason.
    """
    name = config.model_type
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        raise ValueError(
            f"backbone: {name} scales queries by their place in the KV cache (attn_temperature_tuning), but tokens are "
            f"stored in any order here; for texts below {config.floor_scale} tokens (floor_scale), which it does not "
            "scale, set backbone.config.attn_temperature_tuning to false."
        )
    if name == "gpt_neox_japanese":
        raise ValueError(
            f"backbone: {name} reads keys that are contiguous in memory, but a KV cache here has room between the keys "
            f"of two rows; {_SUPPORTED}."
        )
    for option in ("alibi", "attention_types"):  # the latter is GPT-Neo's
        if getattr(config, option, False):
            raise ValueError(
                f"backbone: {name} biases or masks attention by places in the KV cache ({option}), but tokens are "
                f"stored in any order here; {_SUPPORTED}."
            )
    other = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"})
    if other:
        raise ValueError(
            f"backbone: {name} has layers of type {', '.join(other)}, which explicit masks would turn into full "
            "attention; use a model with full attention in every layer."
        )


def sliding_window(config: Any) -> int | None:  # noqa: ANN401 - one class per architecture
    """Return how many tokens layers with sliding-window attention see; ``None`` without such layers.

    A config may hold a window that the model ignores, because its class, such as Llama's, does not know the option.
    Exports write this function out, so it calls no other function of the package.
    """
    is_known = any(hasattr(type(config), name) for name in ("sliding_window", "layer_types"))
    layer_types = getattr(config, "layer_types", None)
    has_window = is_known and (not layer_types or "sliding_attention" in layer_types)
    return getattr(config, "sliding_window", None) if has_window else None


def learns_positions(model: Any, body: nn.Module) -> bool:  # noqa: ANN401 - a transformers model, or peft's wrapper
    """Return whether a model has learnt position embeddings: a second embedding, with a row per position."""
    limit = getattr(model.config, "max_position_embeddings", None)
    embeddings = [module for module in body.modules() if isinstance(module, nn.Embedding)]
    sizes = [module.num_embeddings for module in embeddings if module is not model.get_input_embeddings()]
    return limit is not None and max(sizes, default=0) >= limit
