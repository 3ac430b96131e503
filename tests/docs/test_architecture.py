"""The page on the architecture names modules and functions that exist."""

from __future__ import annotations

import pydoc
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_ways_through_the_code_name_what_exists() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    packages = "cli|training|evaluation|api|checkpoints|data|engine|refusion|families|learning|modeling"
    names = re.findall(rf"`((?:{packages})(?:\.(?!py`)\w+)+)`", page)
    assert len(names) > 20
    for name in names:
        assert pydoc.locate(f"refusion_lit.{name}") is not None, name
