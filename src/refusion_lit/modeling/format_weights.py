"""Loads the weights of published checkpoints: reads the shards, renames and checks against the architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from refusion_lit.modeling.formats import CheckpointFormat
from refusion_lit.utils.errors import reason_of

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_published(
    layout: CheckpointFormat,
    source: str,
    config: PreTrainedConfig,
    *,
    revision: str | None,
    dtype: torch.dtype,
    attn_implementation: str,
) -> PreTrainedModel:
    """Load a published checkpoint into transformers' class of the same architecture.

    Tensors are memory-mapped from the files and converted one by one, so that a checkpoint stored in ``dtype`` takes
    only its own size in memory.

    Args:
        layout: The checkpoint's layout.
        source: Directory or hub id.
        config: Transformers' config of the architecture.
        revision: Pinned revision of a hub id.
        dtype: Type of the weights.
        attn_implementation: Implementation of attention.

    Raises:
        ValueError: If a shard is missing or damaged, or names and shapes are not the architecture's.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    weights = {}
    for path in _shards(source, revision):
        try:
            with safe_open(path, framework="pt") as shard:
                weights |= {layout.library_name(name): shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"backbone.source: {path.name} in {source!r} cannot be read ({reason_of(error)}); fetch it again."
            ) from error
    with torch.device("meta"):
        expected = model_class(config)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    _check(weights, expected, layout, source)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    return model_class.from_pretrained(None, config=config, state_dict=weights, **options)


def _shards(source: str, revision: str | None) -> list[Path]:
    """Return the files of a checkpoint's weights.

    Raises:
        ValueError: If one is missing.
    """
    index = _file(source, _INDEX, revision)
    if index is None:
        names = [_SINGLE]
    else:
        try:
            names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"backbone.source: {_INDEX} in {source!r} cannot be read ({reason_of(error)}); fetch it again."
            raise ValueError(message) from error
    paths = [_file(source, name, revision) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        raise ValueError(
            f"backbone.source: expected {len(names)} file{'s' * (len(names) > 1)} of weights in {source!r}, got none "
            f"for {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}; fetch the missing ones."
        )
    return [path for path in paths if path is not None]


def _file(source: str, name: str, revision: str | None) -> Path | None:
    found = cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _check(weights: Mapping[str, Tensor], model: Any, layout: CheckpointFormat, source: str) -> None:  # noqa: ANN401
    """Refuse weights that are not exactly the architecture's."""
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}  # tied ones once
    got = {name: tuple(weight.shape) for name, weight in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    for name in sorted({*expected, *got}):
        if expected.get(name) != got.get(name):
            raise ValueError(
                f"backbone.source: expected the weights of a {layout.name} checkpoint in {source!r}, as its config "
                f"says, got {layout.published_name(name)} of shape {got.get(name)}, not {expected.get(name)}. Files "
                "may be missing or of another model; fetch them again."
            )
