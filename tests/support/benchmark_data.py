"""Where the benchmarks' files lie, for tests that skip without them: they are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]


def benchmark_file(name: str) -> Path:
    """Return a file below ``REFUSION_LIT_DATA`` or ``../shared/data``, or skip the test."""
    folder = Path(os.environ.get("REFUSION_LIT_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not (folder / name).is_file():
        pytest.skip(f"needs {name} under $REFUSION_LIT_DATA or ../shared/data")
    return folder / name
