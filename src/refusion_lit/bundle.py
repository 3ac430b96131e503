"""What a checkpoint carries besides weights, so that it alone can generate: architecture, traits, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_files, tokenizer_from_files
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.loading import BackboneConfig, DType, architecture_of, prompt_template_of
from refusion_lit.sharded import is_sharded_checkpoint, load_sharded, read_rest
from refusion_lit.types import ModelTraits
from refusion_lit.version import __version__

BUNDLE_KEY = "refusion_lit"
_WEIGHTS_PREFIX = "backbone."


@dataclass(frozen=True, kw_only=True)
class Bundle:
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
            "architecture": json.dumps(self.architecture, default=str),
            "traits": json.dumps(self.traits.to_dict()),
            "tokenizer_files": dict(self.tokenizer_files),
            "prompt_template": self.prompt_template,
        }

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], path: str | Path) -> Bundle:
        """Read it back.

        Raises:
            ValueError: If the checkpoint is not one of ours.
        """
        stored = checkpoint.get(BUNDLE_KEY)
        if not isinstance(stored, dict) or "architecture" not in stored:
            raise ValueError(
                f"ckpt_path: expected a checkpoint written by refusion-lit, got {path}, which says nothing of its "
                "architecture and tokenizer. Train one with `refusion-lit fit`, or give a Hugging Face directory."
            )
        return cls(
            architecture=json.loads(stored["architecture"]),
            traits=ModelTraits.from_dict(json.loads(stored["traits"])),
            tokenizer_files=stored["tokenizer_files"],
            prompt_template=stored.get("prompt_template", "{query}"),
        )

    def backbone_config(self) -> BackboneConfig:
        """Return the config that rebuilds the architecture, with random weights."""
        architecture = {k: v for k, v in self.architecture.items() if k not in {"dtype", "torch_dtype"}}
        return BackboneConfig(config=architecture)


def describe(backbone: Backbone, tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> Bundle:
    """Describe a model."""
    return Bundle(
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
    if not Path(path).is_file():
        raise ValueError(f"ckpt_path: expected a checkpoint file, got {path}, which does not exist. Check the path.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"ckpt_path: {path} cannot be read as a checkpoint ({reason}). It may be truncated; use an earlier one."
        ) from error


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
        overrides: Takes attention and implementation options from here.

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
    bundle = Bundle.from_checkpoint(checkpoint, source)
    tokenizer = tokenizer_from_files(bundle.tokenizer_files)
    config = replace(bundle.backbone_config(), dtype=options.dtype, attn_implementation=options.attn_implementation)
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
    try:
        backbone.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"ckpt_path: the weights in {source} do not fit its architecture ({str(error).splitlines()[0]})."
        ) from error
    return backbone.eval(), tokenizer, bundle.prompt_template
