"""What a checkpoint carries besides weights, so that it alone can generate: architecture, traits, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.checkpoints.sharded import is_sharded_checkpoint, load_sharded, read_rest
from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_files, tokenizer_from_files
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.loading import BackboneConfig, DType, architecture_of, prompt_template_of, reason_of
from refusion_lit.types import ModelTraits
from refusion_lit.version import __version__

METADATA_KEY = "refusion_lit"
_WEIGHTS_PREFIX = "backbone."
_FORMAT = 1
"""Raised when an older version could not read what this one writes."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Description of a trained model, in plain values that load with ``weights_only``.

    Attributes:
        architecture: The transformers config as JSON values.
        traits: What the model was trained to do.
        tokenizer_files: The tokenizer's files, by name.
        prompt_template: How a query becomes a prompt where the tokenizer has no chat template.
        lora: Options of low-rank adapters, if the weights hold any.
    """

    architecture: dict[str, Any]
    traits: ModelTraits
    tokenizer_files: dict[str, str]
    prompt_template: str = "{query}"
    lora: dict[str, Any] | None = None

    def to_checkpoint(self) -> dict[str, Any]:
        """Return what goes into a checkpoint."""
        return {
            "version": __version__,
            "format": _FORMAT,
            "architecture": json.dumps(self.architecture, default=str),
            "traits": json.dumps(self.traits.to_dict()),
            "tokenizer_files": dict(self.tokenizer_files),
            "prompt_template": self.prompt_template,
        }

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], path: str | Path) -> CheckpointMetadata:
        """Read it back.

        Raises:
            ValueError: If the checkpoint is not one of ours.
        """
        stored = checkpoint.get(METADATA_KEY)
        if not isinstance(stored, dict) or "architecture" not in stored:
            raise ValueError(
                f"ckpt_path: expected a checkpoint written by refusion-lit, got {path}, which says nothing of its "
                "architecture and tokenizer. Train one with `refusion-lit fit`, or give a Hugging Face directory."
            )
        if stored.get("format", 1) > _FORMAT:
            raise ValueError(
                f"ckpt_path: expected a checkpoint that refusion-lit {__version__} can read, got {path}, which "
                f"refusion-lit {stored.get('version')} wrote; install that version or a newer one."
            )
        try:
            return cls(
                architecture=json.loads(stored["architecture"]),
                traits=ModelTraits.from_dict(json.loads(stored["traits"])),
                tokenizer_files=stored["tokenizer_files"],
                prompt_template=stored.get("prompt_template", "{query}"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"ckpt_path: the description of the model in {path}, which refusion-lit {stored.get('version')} wrote, "
                f"cannot be read ({reason_of(error)}). Use another checkpoint."
            ) from error

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse another tokenizer than the weights were trained with.

        Raises:
            ValueError: If its tokens are others.
        """
        stored = tokenizer_from_files(self.tokenizer_files)
        if stored.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"data.tokenizer: expected the {len(stored)} tokens that the checkpoint was trained with, got "
                f"{len(tokenizer)} others. Take the config and the data that the checkpoint was trained with."
            )

    def backbone_config(self) -> BackboneConfig:
        """Return the config that rebuilds the architecture, with random weights."""
        architecture = {k: v for k, v in self.architecture.items() if k not in {"dtype", "torch_dtype"}}
        return BackboneConfig(config=architecture)


def describe(backbone: Backbone, tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> CheckpointMetadata:
    """Describe a model."""
    return CheckpointMetadata(
        architecture=dict(architecture_of(backbone)),
        traits=backbone.traits,
        tokenizer_files=tokenizer_files(tokenizer),
        prompt_template=prompt_template,
    )


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint without running anything in it; of a sharded one, everything but its tensors.

    Raises:
        ValueError: If the file is missing, truncated or not a checkpoint.
    """
    if is_sharded_checkpoint(path):
        return read_rest(path)
    if Path(path).is_dir():
        raise ValueError(
            f"ckpt_path: expected a checkpoint file, got the directory {path}; a Hugging Face directory to start from "
            "goes into model.backbone.source."
        )
    if not Path(path).is_file():
        raise ValueError(f"ckpt_path: expected a checkpoint file, got {path}, which does not exist. Check the path.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"ckpt_path: {path} cannot be read as a checkpoint ({reason_of(error)}). Use another one."
        ) from error


def check_weights(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], option: str) -> None:
    """Refuse weights of another architecture.

    Raises:
        ValueError: Naming the first weight that is missing, not expected, or of another shape.
    """
    for name in sorted({*stored, *expected}):
        got = tuple(stored[name].shape) if name in stored else None
        wanted = tuple(expected[name].shape) if name in expected else None
        if got != wanted:
            raise ValueError(
                f"{option}: expected weights that fit the architecture in the config, got {name} of shape {got}, not "
                f"{wanted}. Take the config that the checkpoint was trained with."
            )


def is_checkpoint_file(source: str | Path) -> bool:
    """Whether a source is a Lightning checkpoint rather than a Hugging Face directory or a hub id."""
    return str(source).endswith(".ckpt") or Path(source).is_file() or is_sharded_checkpoint(source)


def load_model(
    source: str | Path,
    *,
    dtype: DType | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: BackboneConfig | None = None,
) -> tuple[Backbone, PreTrainedTokenizerBase, str]:
    """Load a model for inference from a checkpoint, a Hugging Face directory or a hub id.

    Args:
        source: Where it is.
        dtype: Type of the weights; ``None`` keeps float32.
        revision: Pinned revision of a hub id.
        trust_remote_code: Let a directory or hub repository run Python code of its own.
        overrides: Takes attention and implementation options from here, ``lean`` and ``compile`` included.

    Returns:
        The backbone in evaluation mode, its tokenizer, and the prompt template.

    Raises:
        ValueError: If it cannot be loaded.
    """
    options = overrides or BackboneConfig(source=str(source))
    if dtype is not None:
        options = replace(options, dtype=dtype)
    if not is_checkpoint_file(source):
        options = replace(options, source=str(source), revision=revision, trust_remote_code=trust_remote_code)
        tokenizer = PretrainedTokenizer(
            source=str(source), revision=revision, trust_remote_code=trust_remote_code
        ).build(None)
        backbone = options.build(tokenizer).eval()
        return backbone, tokenizer, prompt_template_of(backbone)
    checkpoint = read_checkpoint(source)
    bundle = CheckpointMetadata.from_checkpoint(checkpoint, source)
    tokenizer = tokenizer_from_files(bundle.tokenizer_files)
    stored = bundle.backbone_config()
    config = replace(
        stored,
        dtype=options.dtype,
        attn_implementation=options.attn_implementation,
        lean=options.lean,
        compile=options.compile,
    )
    backbone = config.build(tokenizer)
    backbone.traits = bundle.traits
    if is_sharded_checkpoint(source):
        load_sharded(source, {_WEIGHTS_PREFIX + name: tensor for name, tensor in backbone.state_dict().items()})
        return backbone.eval(), tokenizer, bundle.prompt_template
    weights = {
        name.removeprefix(_WEIGHTS_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(_WEIGHTS_PREFIX)
    }
    check_weights(weights, backbone.state_dict(), "ckpt_path")
    backbone.load_state_dict(weights)
    return backbone.eval(), tokenizer, bundle.prompt_template
