"""The checkpoints and reference outputs in ``tests/goldens/published`` and ``published_2026``; see their READMEs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.text_model import TextModel

GOLDENS = Path(__file__).parent.parent / "goldens"
FOLDERS = (GOLDENS / "published", GOLDENS / "published_2026")
MODELS = {path.name: path for folder in FOLDERS for path in (folder / "models").iterdir()}


@cache
def reference(name: str) -> dict[str, Any]:
    [path] = [folder / f"{name}.json" for folder in FOLDERS if (folder / f"{name}.json").exists()]
    return json.loads(path.read_text())


@cache
def published_model(name: str, dtype: Any = "float32") -> TextModel:
    return refusion_lit.load(MODELS[name], dtype=dtype)
