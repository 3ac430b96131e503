"""refusion-lit: train, decode and compare parallel-decoding language models.

Importing this package is light: torch is loaded when something is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from refusion_lit.version import __version__

if TYPE_CHECKING:
    from refusion_lit.api import Generation, TextModel, load
    from refusion_lit.training.module import SlotDiffusionModule

_LAZY = {
    "Generation": "refusion_lit.api",
    "SlotDiffusionModule": "refusion_lit.training.module",
    "TextModel": "refusion_lit.api",
    "load": "refusion_lit.api",
}

__all__ = ["Generation", "SlotDiffusionModule", "TextModel", "__version__", "load"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
