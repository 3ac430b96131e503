"""The page on serving, as a reader tries it: its requests run as they stand, but for port and model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install --group test")
pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("openai", reason="needs openai: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")

from refusion_lit import load
from refusion_lit.text_model import TextModel
from servers import NAME, address, serving
from tiny import make_bytes_base

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


def blocks(language: str, url: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    own = {"http://127.0.0.1:8000": url, '"first"': f'"{NAME}"', '"base"': f'"{NAME}"'}
    for ours, theirs in own.items():
        found = [block.replace(ours, theirs) for block in found]
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_request_by_curl(model: TextModel) -> None:
    expected = model.generate(["12+34,56+78>"], max_new_tokens=64)[0].text
    with serving(model) as server:
        [command] = [block for block in blocks("bash", address(server)) if block.startswith("curl")]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected


def test_the_requests_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letters = load(make_bytes_base(tmp_path), device="cpu")
    scope: dict[str, Any] = {}
    with serving(letters) as server:
        asked, schema = blocks("py", address(server))
        exec(asked, scope)
        assert scope["answer"].choices[0].message.content in capsys.readouterr().out
        exec(schema, scope)
        scope["client"].close()
    assert [*json.loads(scope["answer"].choices[0].message.content)][:1] == ["city"]
