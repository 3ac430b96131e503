"""The checkpoints and reference outputs in ``tests/goldens/published``; see the README there."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.text_model import TextModel

PUBLISHED = Path(__file__).parent.parent / "goldens" / "published"
MODELS = {path.name: path for path in (PUBLISHED / "models").iterdir()}


@cache
def reference(name: str) -> dict[str, Any]:
    return json.loads((PUBLISHED / f"{name}.json").read_text())


@cache
def published_model(name: str, dtype: Any = "float32") -> TextModel:
    return refusion_lit.load(MODELS[name], dtype=dtype)
