"""The checkpoints and reference outputs in ``tests/goldens``, ``published`` and ``published_2026``."""

from __future__ import annotations

import json
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


@cache
def published_model(name: str, dtype: Any = "float32") -> TextModel:
    return refusion_lit.load(MODELS[name], dtype=dtype)
