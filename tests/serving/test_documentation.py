"""The page on serving, as a reader tries it: its blocks run as they stand, but for the address of the server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install --group test")
pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("openai", reason="needs openai: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")

import openai

from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.serving.protocol import _NEUTRAL, _SWITCHES
from refusion_lit.text_model import TextModel
from support import servers
from support.servers import address, serving
from support.tiny import make_bytes_base
from support.tools import make_tool_model

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)


def block(beginning: str) -> str:
    """Return the one block that begins so."""
    [found] = [text for _, text in BLOCKS if text.startswith(beginning)]
    return found


def served_before(text: str) -> Path:
    """Return the directory that the page serves where a block comes."""
    before = PAGE[: PAGE.index(text)]
    return Path(re.findall(r"^refusion-lit serve --ckpt_path (\S+)", before, re.MULTILINE)[-1])


def replace_address(server: Any, text: str) -> str:
    assert "http://127.0.0.1:8000" in text
    return text.replace("http://127.0.0.1:8000", address(server))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_request_by_curl(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.generate(["12+34,56+78>"], max_new_tokens=64)[0].text
    command = block("curl")
    monkeypatch.setattr(servers, "NAME", served_before(command).name)
    with serving(model) as server:
        command = replace_address(server, command)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected


def test_the_requests_from_python(
    model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scope: dict[str, Any] = {}
    first, schema = block("import openai"), block("schema =")
    monkeypatch.setattr(servers, "NAME", served_before(first).name)
    with serving(model) as server:
        exec(replace_address(server, first), scope)
        text = scope["answer"].choices[0].message.content
        assert text in capsys.readouterr().out
        exec(block("answer = client.responses"), scope)
        assert capsys.readouterr().out.startswith(f"{text} completed ")
        scope["client"].close()
    monkeypatch.setattr(servers, "NAME", served_before(schema).name)
    letters = load(make_bytes_base(tmp_path), device="cpu")
    with serving(letters) as server:
        scope["client"] = scope["openai"].OpenAI(base_url=f"{address(server)}/v1", api_key="none")
        exec(schema, scope)
        scope["client"].close()
    assert [*json.loads(capsys.readouterr().out)][:1] == ["city"]


def test_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(servers, "NAME", "qwen")
    with (
        serving(make_tool_model(tmp_path)) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none") as client,
    ):
        exec(block("city ="), {"client": client})
    name, arguments = capsys.readouterr().out.splitlines()[0].split(" ", 1)
    assert (name, [*json.loads(arguments)]) == ("get_weather", ["city"])


def test_the_schema_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = block("refusion-lit generate")
    directory = served_before(command)
    directory.mkdir(parents=True)
    make_bytes_base(directory)
    subprocess.run(["bash", "-c", block("echo")], check=True, timeout=60)
    assert main(shlex.split(command.replace("\\\n", ""))[1:]) == 0
    assert [*json.loads(capsys.readouterr().out)][:1] == ["city"]


def test_the_page_names_the_fields_that_may_ask_for_nothing() -> None:
    [table] = re.findall(r"Other fields are refused.*?\n\n.*?\n\n", PAGE, re.DOTALL)
    assert {*_NEUTRAL, *_SWITCHES} <= {*re.findall(r"`(\w+)`", table)}


def test_a_block_fetches_the_model_that_the_next_one_serves() -> None:
    directory = served_before(block("schema ="))
    fetching = (Path(__file__).parents[2] / "experiments" / "lossless" / "prepare.py").read_text(encoding="utf-8")
    assert "nox -s real_model -- fetch\n" in block("pip install nox")
    assert f'ROOT = Path("{directory.parent}")' in fetching
    assert f'ROOT / "{directory.name}"' in fetching
