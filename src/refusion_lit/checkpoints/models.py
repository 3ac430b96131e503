"""Models for inference from checkpoints, Hugging Face directories and hub ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.checkpoints.metadata import CheckpointMetadata
from refusion_lit.checkpoints.sharded import is_sharded_checkpoint, load_sharded
from refusion_lit.checkpoints.stored import check_model_source, check_weights, is_checkpoint_file, read_checkpoint
from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_from_files
from refusion_lit.modeling.architecture import check_source, config_of_source
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import load_drafter
from refusion_lit.modeling.loading import BackboneConfig, DType
from refusion_lit.modeling.lora import merged
from refusion_lit.modeling.saving import stored_prompt_template

_WEIGHTS_PREFIX = "backbone."


def load_model(
    source: str | Path,
    *,
    dtype: DType | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: BackboneConfig | None = None,
    draft: str | Path | None = None,
) -> tuple[Backbone, PreTrainedTokenizerBase, str]:
    """Load a model for inference; a checkpoint's adapters are merged into its weights.

    Args:
        source: A checkpoint, a Hugging Face directory or a hub id.
        dtype: Type of the weights; ``None`` keeps float32.
        revision: Pinned revision of a hub id.
        trust_remote_code: Let a directory or hub repository run Python code of its own.
        overrides: Options of attention and its implementation, ``fused_body`` and ``batch_invariant``.
        draft: Directory of a drafter for the model; ``None``: a checkpoint's own, if it has one.

    Returns:
        The backbone in evaluation mode, its tokenizer, and the prompt template.

    Raises:
        ValueError: If it cannot be loaded.
    """
    check_model_source(source)
    options = overrides or BackboneConfig(source=str(source))
    if dtype is not None:
        options = replace(options, dtype=dtype)
    if is_checkpoint_file(source):
        adapted, tokenizer, metadata = load_checkpoint(source, options)
        backbone = Backbone(
            merged(adapted.model),
            adapted.traits,
            adapted.special_tokens,
            fused_body=options.fused_body,
            batch_invariant=options.batch_invariant,
        )
        if adapted.drafter is not None:
            backbone.attach(adapted.drafter)
        return _with_drafter(backbone, draft).eval(), tokenizer, metadata.prompt_template
    check_source(str(source), "ckpt_path")
    options = replace(options, source=str(source), revision=revision, trust_remote_code=trust_remote_code)
    if not trust_remote_code:  # refuse an unknown architecture before its tokenizer
        config_of_source(str(source), options.config, layout=options.layout, revision=revision, trust_remote_code=False)
    tokenizer = PretrainedTokenizer(
        source=str(source), revision=revision, layout=options.layout, trust_remote_code=trust_remote_code
    ).build(None)
    backbone = _with_drafter(options.build(tokenizer), draft).eval()
    return backbone, tokenizer, stored_prompt_template(backbone)


def _with_drafter(backbone: Backbone, draft: str | Path | None) -> Backbone:
    if draft is not None:
        backbone.attach(load_drafter(backbone.model, backbone.body, draft))
    return backbone


def load_checkpoint(
    path: str | Path, options: BackboneConfig | None = None
) -> tuple[Backbone, PreTrainedTokenizerBase, CheckpointMetadata]:
    """Rebuild the model of a checkpoint as it was trained, with its adapters unmerged.

    Args:
        path: The checkpoint, sharded or not.
        options: Gives ``dtype`` and ``attn_implementation``.

    Raises:
        ValueError: If it cannot be read, or its weights do not fit its metadata.
    """
    checkpoint = read_checkpoint(path)
    metadata = CheckpointMetadata.from_checkpoint(checkpoint, path)
    tokenizer = tokenizer_from_files(metadata.tokenizer_files, path)
    backbone = _rebuilt(metadata, tokenizer, options)
    if is_sharded_checkpoint(path):
        load_sharded(path, {_WEIGHTS_PREFIX + name: tensor for name, tensor in backbone.state_dict().items()})
    else:
        _load_weights(backbone, checkpoint["state_dict"])
    return backbone, tokenizer, metadata


def merged_weights(weights: Mapping[str, Tensor], metadata: CheckpointMetadata) -> dict[str, Tensor]:
    """Return a checkpoint's weights with the adapters merged, under the names of a model without adapters.

    Args:
        weights: The ``state_dict`` of the checkpoint.
        metadata: Its metadata.

    Raises:
        ValueError: If the weights do not fit the metadata.
    """
    backbone = _rebuilt(metadata, tokenizer_from_files(metadata.tokenizer_files), None)
    _load_weights(backbone, weights)
    backbone.model = merged(backbone.model)
    return {_WEIGHTS_PREFIX + name: tensor for name, tensor in backbone.state_dict().items()}


def _rebuilt(
    metadata: CheckpointMetadata, tokenizer: PreTrainedTokenizerBase, options: BackboneConfig | None
) -> Backbone:
    """Return the metadata's model with random weights."""
    config = metadata.backbone_config()
    if options is not None:
        config = replace(config, dtype=options.dtype, attn_implementation=options.attn_implementation)
    backbone = config.build(tokenizer, seed=0)  # leaves the global generator as it is
    backbone.traits = metadata.traits
    backbone.adapters = metadata.adapters
    if backbone.drafter is not None and metadata.drafter is not None:
        backbone.drafter.origin = metadata.drafter
    return backbone


def _load_weights(backbone: Backbone, weights: Mapping[str, Any]) -> None:
    named = {
        name.removeprefix(_WEIGHTS_PREFIX): value for name, value in weights.items() if name.startswith(_WEIGHTS_PREFIX)
    }
    check_weights(named, backbone.state_dict(), "ckpt_path")
    backbone.load_state_dict(named)
