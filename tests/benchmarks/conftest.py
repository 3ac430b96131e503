"""Benchmarks are no installed package: they are found from the repository's root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
