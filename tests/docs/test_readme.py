"""The README's Python example runs as it stands, and its first screen has what a newcomer looks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _run(block: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec", dont_inherit=True), scope)
    return scope


@pytest.mark.filterwarnings("error:the model's config does not say")
def test_loading_and_generating(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    scope = _run(BLOCKS[0])
    assert scope["answer"].text == "12+34=46;56+78=134;"
    printed = capsys.readouterr().out.strip()
    assert f"# {printed}\n" in BLOCKS[0], "the output beside the example"


def test_the_first_screen_has_install_first_output_and_models() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    first = "\n".join(lines[:42])
    commands = ("git clone", "pip install nox && nox -s demo", "pip install nox && nox -s tests")
    assert all(part in first for part in (*commands, "# 12+34=46;", "| models | decoders |"))
