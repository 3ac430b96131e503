"""The drawing of the rooms is the code's, and the ways through the code name functions that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_drawing_shows_todays_rooms_and_imports(tmp_path: Path) -> None:
    now = str(tmp_path / "now.svg")
    code = f"import pathlib, architecture; pathlib.Path({now!r}).write_text(architecture.drawing(), encoding='utf-8')"
    subprocess.run([sys.executable, "-c", code], cwd=DOCS, check=True)
    committed = (DOCS / "img" / "architecture.svg").read_text(encoding="utf-8")
    assert Path(now).read_text(encoding="utf-8") == committed, "run: python docs/architecture.py"


def test_every_import_of_the_drawing_points_right_of_the_diagonal() -> None:
    drawing = (DOCS / "img" / "architecture.svg").read_text(encoding="utf-8")
    dots = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawing)]
    squares = re.findall(r'<rect x="(\d+)" y="(\d+)" width="20"', drawing)
    diagonal = {float(y) + 10: float(x) + 10 for x, y in squares}
    assert len(dots) > 30
    assert all(x > diagonal[y] for x, y in dots)


def test_the_ways_through_the_code_name_what_exists() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rooms = "cli|training|evaluation|api|checkpoints|data|engine|refusion|families|learning|modeling"
    names = re.findall(rf"`((?:{rooms})(?:\.(?!py`)\w+)+)`", page)
    assert len(names) > 20
    for name in names:
        parts = name.split(".")
        for stop in range(len(parts), 0, -1):  # the longest part that is a module, then attributes
            try:
                found = import_module(".".join(["refusion_lit", *parts[:stop]]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[stop:]:
                found = getattr(found, attribute)
            break
        else:
            raise AssertionError(name)
