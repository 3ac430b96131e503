"""Other people's servers on our exports and models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs openai: pip install --group test")

import openai

from refusion_lit import load
from refusion_lit.decoding import ReFusion
from refusion_lit.modeling.saving import save_model
from refusion_lit.text_model import TextModel
from refusion_lit.types import ModelTraits
from support.servers import MODEL

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "litserve_server.py"
COMMAND = shutil.which("transformers", path=str(Path(sys.executable).parent))


@pytest.fixture(scope="module")
def model() -> TextModel:
    """A hybrid model."""
    model = load(MODEL, device="cpu")
    model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    return model


@pytest.fixture(scope="module")
def host(model: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """``transformers serve`` on an export: its address and the model's name."""
    pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
    if COMMAND is None:
        pytest.skip("needs the command transformers: pip install 'transformers[serving]'")
    directory = tmp_path_factory.mktemp("export") / "model"
    save_model(model.backbone, model.tokenizer, directory)
    command = [COMMAND, "serve", "--trust-remote-code", "--device", "cpu", str(directory), "--port"]
    with run_server(command, directory.parent) as url:
        yield f"{url}/v1", str(directory)


@contextmanager
def run_server(command: list[str], folder: Path) -> Iterator[str]:
    """Run a server; yield its address once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "log"
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        # A session of its own: LitServe leaves its workers behind when it is terminated.
        process = subprocess.Popen(
            [*command, str(port)], stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        until = time.monotonic() + 120
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_transformers_serve_streams_what_our_engine_decodes(host: tuple[str, str], model: TextModel) -> None:
    url, name = host
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:

        def pieces(text: str, **options: Any) -> list[str]:
            stream = client.completions.create(model=name, prompt=text, stream=True, **options)
            return [chunk.choices[0].text for chunk in stream if chunk.choices]

        for text, length in (("12+34,56+78>", 24), ("7+8=", 5)):
            expected = model.generate([text], decoder=ReFusion(), max_new_tokens=length)[0].text
            assert "".join(pieces(text, max_tokens=length, temperature=0)) == expected
        for temperature in (0.7, 1.0):  # not ignored in silence
            with pytest.raises(openai.APIError) as caught:
                pieces("1+1", max_tokens=5, temperature=temperature)
            message = f"temperature: expected none, got {temperature} in the generation config"
            assert message in str(caught.value.body)


def test_the_example_for_litserve_gives_each_request_its_answer(tmp_path: Path) -> None:
    pytest.importorskip("litserve", reason="needs litserve: pip install litserve")
    model = load(MODEL, device="cpu")
    questions = [("12+34,56+78>", 24), ("7+8=", 5), ("99+1", 24), ("3,4", 16)]
    with (
        run_server([sys.executable, str(EXAMPLE), str(MODEL), "--port"], tmp_path) as url,
        ThreadPoolExecutor(4) as pool,
    ):

        def answer(question: tuple[str, int]) -> Any:
            text, length = question
            body = json.dumps({"prompt": text, "max_tokens": length}).encode()
            request = urllib.request.Request(f"{url}/predict", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read())

        answers = list(pool.map(answer, questions))
    rows = [model.generate([text], max_new_tokens=length)[0] for text, length in questions]
    expected = [{"text": row.text, "tokens": row.num_tokens, "forwards": row.num_forwards} for row in rows]
    assert answers == expected
