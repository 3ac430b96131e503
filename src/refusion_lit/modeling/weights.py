"""Loads a source's weights, compares them with its config, and identifies weights by a digest."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from refusion_lit.modeling.source import ModelSource
from refusion_lit.utils.errors import reason_of

disable_progress_bar()  # otherwise a bar for every load interrupts a program's output


def initialise_weights(
    config: Any,  # noqa: ANN401 - one class per architecture
    dtype: torch.dtype,
    attn_implementation: str,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return a model with random weights."""
    return AutoModelForCausalLM.from_config(
        config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,  # without it transformers may ask on standard input
    )


def load_weights(source: ModelSource, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """Load the model of a Hugging Face directory or hub id.

    Raises:
        ValueError: If the files are damaged, or do not hold exactly the weights that the config asks for.
    """
    _check_num_parameters(source)
    published = source.published
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.name,
            config=source.config,
            # Without a generation config, transformers looks for generation options in config.json.
            generation_config=source.generation_config,
            revision=source.revision,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=source.trust_remote_code,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            key_mapping=None if published is None else published.key_mapping,
        )
    except Exception as error:  # readers of formats have errors of their own for damaged files
        raise ValueError(
            f"backbone.source: the weights of {source.name!r} cannot be loaded ({reason_of(error)}). They may be "
            "truncated or of another architecture than config.json says; fetch them again."
        ) from error
    model, report = loaded
    published_name = str
    if published is not None:
        published_name = published.published_name
        model._weight_conversions = None  # otherwise transformers would save it under the family's names
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"backbone.source: the weights of {source.name!r} do not fit its config: {published_name(name)} has the "
            f"shape {tuple(stored)}, not {tuple(wanted)}. Take the config that they were trained with."
        )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would leave them random
        raise ValueError(
            f"backbone.source: expected all weights in {source.name!r}, got none for {published_name(missing[0])} and "
            f"{len(missing) - 1} more. Fetch them again"
            f"{', or take the config that they were trained with (backbone.config: {})' * bool(source.overrides)}."
        )
    extra = sorted(name for name in report["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq"))
    if extra:  # transformers would drop them
        raise ValueError(
            f"backbone.source: expected only weights of the architecture in the config, got {extra[0]} and "
            f"{len(extra) - 1} more in {source.name!r}. Take the config that they were trained with."
        )
    return model


def _check_num_parameters(source: ModelSource) -> None:
    """Refuse a config that asks for far more weights than the files hold, before memory is allocated for them.

    Raises:
        ValueError: With both numbers.
    """
    stored = _stored_sizes(Path(source.name))
    config = source.config
    if not stored or getattr(config, "quantization_config", None) is not None:  # quantised weights are packed
        return
    num_layers = getattr(config, "num_hidden_layers", None) or 0
    if num_layers > len(stored):  # building the layers would take long
        wanted = f"{num_layers} layers, in a file of {len(stored)} tensors"
    else:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)
        except Exception as error:  # transformers' models raise errors of their own
            raise ValueError(
                f"backbone.source: expected options that fit together in the config of {source.name!r}, got "
                f"{type(error).__name__}: {reason_of(error)}; correct config.json."
            ) from error
        num_wanted, num_stored = sum(weight.numel() for weight in model.parameters()), sum(stored)
        if num_wanted <= 2 * num_stored:  # smaller differences are named by weight
            return
        wanted = f"{num_wanted:,} parameters, in files of {num_stored:,}"
    raise ValueError(
        f"backbone.source: the weights of {source.name!r} do not fit its config, which asks for {wanted}. Take the "
        "config that they were trained with."
    )


def _stored_sizes(folder: Path) -> list[int]:
    """Return the tensors' numbers of elements in a directory's safetensors files.

    The list is empty if a file is missing or damaged, which loading reports.
    """
    sizes: list[int] = []
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            shards = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            if not all((folder / name).is_file() for name in shards):
                return []
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                sizes += [prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError):
            return []
    return sizes


@torch.no_grad()
def weights_digest(model: torch.nn.Module) -> str | None:
    """Return a digest of a model's weights, 16 hexadecimal digits.

    The digest covers the names and shapes of all parameters and 64 values per parameter, which is fast for large
    models. Values are rounded to bfloat16, so that loading in float32 or bfloat16 gives the same digest.

    Args:
        model: A model; tied weights count once.

    Returns:
        The digest; ``None`` if this process does not hold all weights.
    """
    state = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if type(weight.data) is not torch.Tensor:  # sharded
            return None
        flat = weight.detach().flatten()
        count = min(len(flat), 64)
        # In integers: float32 has no room for the indices of a large embedding.
        index = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
        values = flat[index].to(torch.bfloat16).view(torch.int16).cpu().numpy()
        state.update(f"{name}{tuple(weight.shape)}".encode() + values.tobytes())
    return state.hexdigest()[:16]
