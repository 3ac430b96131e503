"""Modules from files that are not on the path of imports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load_module(path: Path) -> Any:
    """Execute a file and return its module, without registering the module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
