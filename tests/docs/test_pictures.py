"""The committed pictures are those that docs/pictures.py draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pictures_are_as_drawn_today(tmp_path: Path) -> None:
    code = f"import pathlib, drawing; drawing.TARGET = pathlib.Path({str(tmp_path)!r}); import pictures; "
    subprocess.run([sys.executable, "-c", code + "[draw() for draw in pictures.PICTURES]"], cwd=DOCS, check=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) > 15
    for name, content in drawn.items():
        assert (DOCS / "img" / name).read_text(encoding="utf-8") == content, f"run docs/pictures.py: {name}"
        assert ElementTree.fromstring(content).get("aria-label")
