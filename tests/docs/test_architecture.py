"""The page on the architecture names modules and functions that exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_ways_through_the_code_name_what_exists() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rooms = "cli|training|evaluation|api|checkpoints|data|engine|refusion|families|learning|modeling"
    names = re.findall(rf"`((?:{rooms})(?:\.(?!py`)\w+)+)`", page)
    assert len(names) > 20
    for name in names:
        parts = name.split(".")
        for stop in range(len(parts), 0, -1):  # the longest part that is a module, then attributes
            try:
                target = import_module(".".join(["refusion_lit", *parts[:stop]]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[stop:]:
                target = getattr(target, attribute)
            break
        else:
            raise AssertionError(name)
