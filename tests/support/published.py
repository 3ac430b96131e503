"""The checkpoints and reference outputs in ``tests/goldens``, ``published`` and ``published_2026``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.text_model import TextModel

PUBLISHED, PUBLISHED_2026 = (
    Path(__file__).parent.parent / "goldens" / name for name in ("published", "published_2026")
)
MODELS = {path.name: path for folder in (PUBLISHED, PUBLISHED_2026) for path in (folder / "models").iterdir()}


@cache
def reference(name: str) -> dict[str, Any]:
    path = PUBLISHED / f"{name}.json"
    return json.loads((path if path.is_file() else PUBLISHED_2026 / f"{name}.json").read_text())


def with_batch_sizes(settings: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return settings with batch sizes: 16, which takes all prompts of a setting, and 1 for every third setting.

    Batch size 1 for some settings is enough, because contract tests check that a batch changes no row.
    """
    cases = [setting if isinstance(setting, tuple) else (setting,) for setting in settings]
    return [(*case, 16) for case in cases] + [(*case, 1) for case in cases[::3]]


def select_runs(name: str, setting: int, batch_size: int | None = None) -> list[dict[str, Any]]:
    """Return the reference runs of a setting; for a batch size of 1 only the first (see ``with_batch_sizes``)."""
    runs = [run for run in reference(name)["runs"] if run["setting"] == setting]
    assert len(runs) >= 3
    return runs[:1] if batch_size == 1 else runs


@cache
def published_model(name: str, dtype: Any = "float32") -> TextModel:
    return refusion_lit.load(MODELS[name], dtype=dtype)


class _WithEos:
    """A wrapper of a model that replaces its EOS token."""

    def __init__(self, backbone: Any, eos_token_id: int) -> None:
        self._backbone = backbone
        self.special_tokens = replace(backbone.special_tokens, eos_token_ids=(eos_token_id,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)


def end_at(backbone: Any, eos_token_id: int) -> Any:
    """Return a model whose responses end at the given token alone."""
    return _WithEos(backbone, eos_token_id)
