"""The Python example in the README runs as it stands."""

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
