"""The README's Python examples run, in order and as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"


def _run(block: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec", dont_inherit=True), scope)
    return scope


def test_loading_and_generating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODEL, tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    scope = _run(BLOCKS[0])
    assert scope["answer"].text == "12+34=46;56+78=134;"
    printed = capsys.readouterr().out.strip()
    assert f"# {printed}\n" in BLOCKS[0], "the output beside the example"
