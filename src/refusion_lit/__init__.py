"""refusion-lit: train, decode and compare parallel-decoding language models.

Importing this package is light: torch is loaded when something is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from refusion_lit.version import __version__

if TYPE_CHECKING:
    from refusion_lit.checkpoints.models import load
    from refusion_lit.data.module import InstructionDataModule
    from refusion_lit.data.tokenizers import CharacterTokenizer, PretrainedTokenizer
    from refusion_lit.engine.output import Generation
    from refusion_lit.modeling.load import BackboneConfig
    from refusion_lit.tasks.files import InstructionFiles
    from refusion_lit.text_model import TextModel
    from refusion_lit.training.module import SlotDiffusionModule
    from refusion_lit.types import Prompt, SamplingParams

_LAZY = {
    "BackboneConfig": "refusion_lit.modeling.load",
    "CharacterTokenizer": "refusion_lit.data.tokenizers",
    "Generation": "refusion_lit.engine.output",
    "InstructionDataModule": "refusion_lit.data.module",
    "InstructionFiles": "refusion_lit.tasks.files",
    "PretrainedTokenizer": "refusion_lit.data.tokenizers",
    "Prompt": "refusion_lit.types",
    "SamplingParams": "refusion_lit.types",
    "SlotDiffusionModule": "refusion_lit.training.module",
    "TextModel": "refusion_lit.text_model",
    "load": "refusion_lit.checkpoints.models",
}

__all__ = [
    "BackboneConfig", "CharacterTokenizer", "Generation", "InstructionDataModule", "InstructionFiles",
    "PretrainedTokenizer", "Prompt", "SamplingParams", "SlotDiffusionModule", "TextModel", "__version__", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
