"""Metadata of checkpoints: a model's description in plain values. With it, a checkpoint loads without a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from refusion_lit.data.tokenizers import tokenizer_files
from refusion_lit.modeling.block_drafter import BlockDrafterOptions
from refusion_lit.modeling.drafter import DrafterOptions, DrafterOrigin
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.lora import Adapters
from refusion_lit.text_model import TextModel
from refusion_lit.types import ModelTraits
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require_template
from refusion_lit.version import __version__

METADATA_KEY = "refusion_lit"
_FORMAT = 1
"""Version of the format, raised when older versions can no longer read the metadata."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Description of a checkpoint's model in plain values, which torch loads with ``weights_only``.

    Attributes:
        architecture: The transformers config as JSON values, with the vocabulary size of the stored weights.
        traits: What the model was trained to do.
        tokenizer_files: The tokenizer's files by name.
        prompt_template: Turns a query into a prompt if the tokenizer has no chat template.
        adapters: The low-rank adapters among the weights, if any.
        drafter: The drafter among the weights, if any.
    """

    architecture: dict[str, Any]
    traits: ModelTraits
    tokenizer_files: dict[str, str]
    prompt_template: str = "{query}"
    adapters: Adapters | None = None
    drafter: DrafterOrigin | None = None

    @classmethod
    def from_model(cls, model: TextModel) -> CheckpointMetadata:
        """Return the description of a model."""
        backbone = model.backbone
        return cls(
            architecture=backbone.config.to_dict(),
            traits=backbone.traits,
            tokenizer_files=tokenizer_files(model.tokenizer),
            prompt_template=model.prompt_template,
            adapters=backbone.adapters,
            drafter=None if backbone.drafter is None else DrafterOrigin.from_drafter(backbone.drafter),
        )

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the value to store under ``METADATA_KEY``."""
        return {
            "version": __version__,
            "format": _FORMAT,
            "architecture": json.dumps(self.architecture, default=str),
            "traits": json.dumps(self.traits.to_dict()),
            "tokenizer_files": dict(self.tokenizer_files),
            "prompt_template": self.prompt_template,
            "adapters": None if self.adapters is None else json.dumps(asdict(self.adapters)),
            "drafter": None if self.drafter is None else json.dumps(asdict(self.drafter)),
        }

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any], path: str | Path) -> CheckpointMetadata:
        """Read a checkpoint's metadata.

        Args:
            checkpoint: The checkpoint's values.
            path: Its file, for messages.

        Raises:
            ValueError: If the checkpoint was not written by this package, or by a newer version.
        """
        stored = checkpoint.get(METADATA_KEY)
        if not isinstance(stored, dict) or "architecture" not in stored:
            raise ValueError(
                f"ckpt_path: expected a checkpoint written by refusion-lit, got {path}, which has no record of "
                "architecture and tokenizer. Train one with `refusion-lit fit`, or give a Hugging Face directory."
            )
        if stored.get("format", 1) > _FORMAT:
            raise ValueError(
                f"ckpt_path: expected a checkpoint that refusion-lit {__version__} can read, got {path}, which "
                f"refusion-lit {stored.get('version')} wrote; install that version or a newer one."
            )
        try:
            adapters = stored.get("adapters")
            drafter = stored.get("drafter")
            return cls(
                architecture=json.loads(stored["architecture"]),
                traits=ModelTraits.from_dict(json.loads(stored["traits"])),
                tokenizer_files=stored["tokenizer_files"],
                prompt_template=require_template(stored.get("prompt_template", "{query}")),
                adapters=None if adapters is None else Adapters.from_dict(json.loads(adapters)),
                drafter=None if drafter is None else DrafterOrigin.from_dict(json.loads(drafter)),
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"ckpt_path: the metadata in {path}, which refusion-lit {stored.get('version')} wrote, cannot be read "
                f"({error_reason(error)}). Export it with that version."
            ) from error

    @property
    def entry(self) -> dict[str, Any]:
        """The config's entry ``refusion_lit``, with the traits."""
        # The traits omit prompt_is_block if it is false, but the config may hold an older value.
        return (self.architecture.get("refusion_lit") or {}) | {"prompt_is_block": False} | self.traits.to_dict()

    def backbone_config(self) -> BackboneConfig:
        """Return options that rebuild the model with random weights, adapters and drafter included."""
        options = None if self.drafter is None else self.drafter.options
        architecture = {k: v for k, v in self.architecture.items() if k not in {"dtype", "torch_dtype"}}
        return BackboneConfig(
            config=architecture | {"refusion_lit": self.entry},
            lora=None if self.adapters is None else self.adapters.options,
            drafter=options if isinstance(options, DrafterOptions) else None,
            block_drafter=options if isinstance(options, BlockDrafterOptions) else None,
        )
