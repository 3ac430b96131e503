"""The README's Python examples run, in order and as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"


@pytest.mark.parametrize("page", ["README.md", "experiments/demo/README.md"])
def test_the_table_is_that_of_the_committed_demo(page: str) -> None:
    program = [sys.executable, str(ROOT / "experiments" / "demo" / "table.py")]
    table = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert table.count("\n") > 8
    assert table in (ROOT / page).read_text(encoding="utf-8"), "put in the output of: python experiments/demo/table.py"


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
