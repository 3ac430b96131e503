"""Faults around a server: a fault of a request, a client or the model harms no other request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("openai", reason="needs openai: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")

import openai

from cli.conftest import QUICKSTART, TINY
from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.serving import Limits
from refusion_lit.serving.app import Server
from refusion_lit.serving.service import Service
from refusion_lit.serving.worker import Worker
from refusion_lit.text_model import TextModel
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from support.forks import start, wait
from support.servers import MODEL, NAME, address, raw, serving, slow, wait_for, wrap_body
from support.tiny import make_bytes_base

ENVIRONMENT = os.environ | {"REFUSION_LIT_API_KEY": ""}
BAD = ">9>9>"
"""A prompt for which the tests' models fail."""
GOOD = ["1+1", "12+3", "7,8", "99+1=", "3;4"]


@pytest.fixture(scope="module")
def model() -> TextModel:
    """Return a model that never ends a response."""
    endless = load(MODEL, device="cpu")
    head = endless.backbone.head_runner()
    ends = torch.tensor(endless.backbone.special_tokens.eos_token_ids)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return head(hidden).index_fill_(-1, ends, -torch.inf)

    endless.backbone.logits = logits  # type: ignore[method-assign]
    endless.backbone.head_runner = lambda: logits  # type: ignore[method-assign]
    return endless


def make_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0)


def complete(server: Server, text: str | list[str], **options: Any) -> Any:
    with make_client(server) as client:
        return client.completions.create(model=NAME, prompt=text, **options)


def get_metrics(server: Server) -> bytes:
    with urllib.request.urlopen(f"{address(server)}/metrics", timeout=20) as answer:
        return answer.read()


def stream_pieces(server: Server, text: str, **options: Any) -> list[str]:
    """Return the texts of the chunks of a streamed completion."""
    with make_client(server) as client:
        stream = client.completions.create(model=NAME, prompt=text, stream=True, **options)
        return [chunk.choices[0].text for chunk in stream]


def decode_alone(model: TextModel, decoder: Decoder, text: str, max_new_tokens: int) -> str:
    """Return the text that the model gives without a server."""
    prompt = Prompt(token_ids=tuple(model.encode(text)), id="0")
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return model.decode([prompt], decoder, sampling, allow_mismatch=True).rows[0].text


# Faults of a model. They get hidden states and the rows of the batch that hold the bad prompt.


def run_out_of_memory(hidden: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")


def raise_key_error(hidden: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
    raise KeyError("/a/secret/path")


def return_nan(hidden: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(is_bad[:, None, None], torch.nan)


FAULTS = [
    pytest.param(run_out_of_memory, 503, "out of memory", id="out of memory"),
    pytest.param(raise_key_error, 500, "KeyError", id="a bug"),
    pytest.param(return_nan, 500, "logits", id="logits that are not numbers"),
]


@pytest.mark.parametrize(("fault", "status", "message"), FAULTS)
def test_a_request_that_fails_harms_no_other(
    model: TextModel, fault: Callable[..., torch.Tensor], status: int, message: str
) -> None:
    """While a bad prompt fails, other requests in the same batch get the texts that they get alone, also as streams."""
    bad = torch.tensor(model.encode(BAD)[:2])

    def fail(body: Callable[..., torch.Tensor], ids: torch.Tensor, *args: Any) -> torch.Tensor:
        hidden = body(ids, *args)
        is_bad = (ids[:, :2] == bad).all(-1) if ids.shape[1] > 1 else torch.zeros(len(ids), dtype=torch.bool)
        return fault(hidden, is_bad) if is_bad.any() else hidden

    def prepare(worker: Worker) -> None:
        wrap_body(worker, fail)
        slow(worker, 0.002)

    decoder = Autoregressive()
    with serving(model, decoder, prepare=prepare) as server, ThreadPoolExecutor(9) as pool:
        good = {text: pool.submit(complete, server, text, max_tokens=30) for text in GOOD}
        failed = pool.submit(complete, server, BAD)
        streamed = pool.submit(stream_pieces, server, "5+5", max_tokens=30)
        with pytest.raises(openai.InternalServerError) as caught:
            failed.result()
        assert caught.value.status_code == status
        assert message in caught.value.body["message"]
        assert "secret" not in caught.value.body["message"]
        for text, answer in good.items():
            assert answer.result().choices[0].text == decode_alone(model, decoder, text, 30)
        assert "".join(streamed.result()) == decode_alone(model, decoder, "5+5", 30), "no piece twice, none lost"
        assert complete(server, "8+8").choices[0].text == decode_alone(model, decoder, "8+8", 16)
        with pytest.raises(openai.APIError, match=message):
            stream_pieces(server, BAD)


def test_each_request_of_a_failed_call_runs_alone(model: TextModel) -> None:
    """A request that runs alone shows whether it is at fault. Later requests wait until all three have run."""
    worker = Worker(model, Autoregressive(), SamplingParams(), DecodingOptions(batch_size=4), Limits())
    worker._make_engine()
    prompt = Prompt(token_ids=tuple(model.encode("1+1")), id="0")
    options = {"wants_rounds": False, "num_top_logprobs": None, "deadline": math.inf}
    job = partial(SimpleNamespace, prompt=prompt, sampling=SamplingParams(), **options)
    jobs: Any = [job(name=name) for name in "abcde"]
    worker.submit(jobs[:3])
    worker._admit()
    worker._recover(RuntimeError("of one of them"))
    worker.submit(jobs[3:])
    rounds: list[str] = []
    while worker.waiting:
        worker._admit()
        rounds.append("".join(request.name for request in worker.active.values()))
        worker.active.clear()
    assert rounds == ["a", "b", "c", "de"]


class LateEncoding:
    """Holds all encoding of prompts back until ``released`` is set.

    Attributes:
        released: Lets encoding go on.
        num_begun: Number of prompts whose encoding has begun.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.num_begun, encode = threading.Event(), 0, Service._encode

        def encode_late(service: Service, body: Any) -> Any:
            self.num_begun += 1
            assert self.released.wait(60)
            return encode(service, body)

        monkeypatch.setattr(Service, "_encode", encode_late)


def test_a_prompt_that_is_encoded_for_long_blocks_nobody(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the server answers ``/health``; requests that wait for the tokenizer count as a queue."""
    encoding = LateEncoding(monkeypatch)
    answers: list[str | None] = []  # None: refused

    def ask(server: Server) -> None:
        try:
            answers.append(complete(server, "1+1").choices[0].text)
        except openai.RateLimitError:
            answers.append(None)

    with serving(model, rows=1, max_waiting=1) as server:
        asked = [threading.Thread(target=ask, args=[server]) for _ in range(3)]
        for thread in asked:
            thread.start()
        try:
            wait_for(lambda: answers)
            assert (answers, encoding.num_begun) == ([None], 1), "one at a time"
            with urllib.request.urlopen(f"{address(server)}/health", timeout=30) as health:
                assert health.status == 200
        finally:
            encoding.released.set()
        for thread in asked:
            thread.join()
        expected = complete(server, "1+1").choices[0].text
    assert answers == [None, expected, expected]


def test_a_forward_pass_that_hangs_delays_neither_clients_nor_the_end_of_the_server(model: TextModel) -> None:
    goes_on = threading.Event()

    def prepare(worker: Worker) -> None:
        def hang(body: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
            if worker.is_ready:
                goes_on.wait(180)  # longer than the client waits, and than the server may take to end
            return body(*args)

        worker.grace_seconds = 0.5
        wrap_body(worker, hang)

    try:
        with serving(model, Autoregressive(), prepare=prepare, max_seconds=2.0, drain_seconds=0.0) as server:
            with pytest.raises(openai.InternalServerError, match="time limit") as caught:
                complete(server, "1+1")
            assert caught.value.status_code == 504
    finally:  # the server has ended before
        goes_on.set()


def test_if_no_further_engine_can_be_made_all_requests_fail_and_the_server_ends(model: TextModel) -> None:
    """This happens after an error of a GPU that leaves its context unusable."""
    is_lost = threading.Event()

    def fail_if_lost(function: Callable[..., Any], *args: Any) -> Any:
        if is_lost.is_set():
            raise RuntimeError("device-side assert triggered")
        return function(*args)

    def prepare(worker: Worker) -> None:
        wrap_body(worker, fail_if_lost)
        worker.checked_model.make_cache = partial(fail_if_lost, worker.checked_model.make_cache)
        slow(worker)

    with serving(model, Autoregressive(), rows=2, prepare=prepare) as server, ThreadPoolExecutor(4) as pool:
        worker = server.worker
        asked = [pool.submit(complete, server, text, max_tokens=400) for text in GOOD[:4]]
        wait_for(lambda: (len(worker.active), len(worker.waiting)) == (2, 2))
        is_lost.set()
        for request in asked:
            with pytest.raises(openai.InternalServerError, match="RuntimeError") as caught:
                request.result(timeout=20)
            assert caught.value.status_code == 500
        wait_for(lambda: server.should_exit)
        assert worker.failure
        assert not worker.thread.is_alive()


def post(text: str, **options: Any) -> str:
    body = json.dumps({"model": NAME, "prompt": text, **options})
    head = "POST /v1/completions HTTP/1.1\nHost: 127.0.0.1\nContent-Type: application/json\n"
    return f"{head}Content-Length: {len(body)}\n\n{body}"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(model: TextModel, stream: bool) -> None:
    with serving(model, Autoregressive(), rows=1, prepare=slow) as server:
        worker = server.worker
        connection = raw(server, post("1+1", stream=stream, max_tokens=450))
        wait_for(lambda: len(worker.active) == 1)
        waiting = raw(server, post("1+2", stream=stream, max_tokens=450))  # leaves the queue, too
        wait_for(lambda: len(worker.waiting) == 1)
        waiting.close()
        wait_for(lambda: not worker.waiting)
        connection.close()
        wait_for(lambda: not worker.active)
        assert complete(server, "2+2").choices[0].text == decode_alone(model, Autoregressive(), "2+2", 16)
        assert b'{outcome="gone"} 2.0' in get_metrics(server)


def test_a_client_that_leaves_at_the_moment_of_an_update_has_left() -> None:
    """If waiting for the update swallowed the cancellation, the answer would be decoded to its end."""

    async def leave() -> bool:
        job: Any = SimpleNamespace(result=None, deadline=math.inf)
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "forwards"), 0)
        run: Any = SimpleNamespace(events=asyncio.Queue(), started=time.monotonic(), jobs=[job], usage=usage, id="chat")
        service: Any = MagicMock(worker=SimpleNamespace(limits=Limits()))
        task = asyncio.create_task(anext(Service._events(service, run)))
        await asyncio.sleep(0.01)
        run.events.put_nowait("an update")
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled() and job.deadline == 0

    assert asyncio.run(leave())


def test_a_slow_reader_delays_no_other_request(model: TextModel) -> None:
    """The slow reader's stream does not fit into the socket's buffers. The server keeps the rest, and serves others."""
    length = 450
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(model, Autoregressive(), rows=2))
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections, too
        asked = post("1+1", stream=True, max_tokens=length, stream_options={"include_decode": True})
        reader = stack.enter_context(raw(server, asked, buffer=4096))
        expected = decode_alone(model, Autoregressive(), "2+2", 16)
        assert [complete(server, "2+2").choices[0].text for _ in range(3)] == [expected] * 3
        wait_for(lambda: not server.worker.active)
        assert b'{outcome="done"} 3.0' in get_metrics(server), "the stream is decoded, but not sent"
        texts = []
        for line in reader.makefile("rb"):
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
        assert "".join(texts) == decode_alone(model, Autoregressive(), "1+1", length)
        wait_for(lambda: b'{outcome="done"} 4.0' in get_metrics(server))


def test_the_cache_is_bounded_by_the_limits(model: TextModel) -> None:
    with serving(model, Autoregressive(), rows=2, max_prompt_tokens=80, max_answer_tokens=80) as server:
        for prompt in ("1", "1" * 80, ["1" * 80] * 4):
            assert complete(server, prompt, max_tokens=80).usage.completion_tokens % 80 == 0
        with pytest.raises(openai.BadRequestError, match=r"max_tokens: .*80, got 81"):
            complete(server, "1", max_tokens=81)
        cache = server.worker.engine.cache
        assert cache is not None
        assert (cache.num_rows, cache.capacity) == (2, 256), "80 + 80, rounded up to chunks of 128"


def test_the_text_that_a_schema_gives_counts_as_prompt(tmp_path: Path) -> None:
    masked = load(make_bytes_base(tmp_path, mask=True), device="cpu")

    def ask(server: Server, length: int) -> str:
        form = {"type": "json_schema", "json_schema": {"schema": {"const": "x" * length}}}
        return json.loads(complete(server, "1", max_tokens=80, extra_body={"response_format": form}).choices[0].text)

    with serving(masked, ReFusion(), rows=2, max_prompt_tokens=80, max_answer_tokens=80) as server:
        assert ask(server, 76) == "x" * 76, "1 token, 76, 2 quotes and EOS"
        with pytest.raises(openai.BadRequestError, match=r"prompt: .*at most 80 tokens.*schema"):
            ask(server, 300)
        cache = server.worker.engine.cache
        assert cache is not None
        assert cache.capacity <= 256, "80 + 80, rounded up to chunks of 128"


def test_a_time_limit_ends_a_request(model: TextModel) -> None:
    with serving(model, Autoregressive(), prepare=slow, max_seconds=0.2) as server:
        with pytest.raises(openai.InternalServerError, match="time limit") as caught:
            complete(server, "1+1", max_tokens=400)
        assert caught.value.status_code == 504
        assert complete(server, "1+1", max_tokens=2).choices


def test_the_time_limit_starts_when_a_request_arrives(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Service._encode

    def encode_slowly(service: Service, asked: Any) -> Any:
        time.sleep(0.3)
        return encode(service, asked)

    with serving(model, Autoregressive(), max_seconds=0.25) as server:
        assert complete(server, "1+1", max_tokens=1).choices
        monkeypatch.setattr(Service, "_encode", encode_slowly)
        with pytest.raises(openai.InternalServerError, match="time limit"):
            complete(server, "1+1", max_tokens=1)


def test_a_request_is_refused_at_its_time_limit_while_a_thread_works_for_it(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, max_seconds=1.0) as server:
        encoding = LateEncoding(monkeypatch)
        try:
            for _ in range(2):  # the second request waits for the first request's thread
                with pytest.raises(openai.InternalServerError, match="time limit"):
                    complete(server, "1+1", max_tokens=1)
        finally:
            encoding.released.set()
        assert encoding.num_begun == 1
        assert complete(server, "1+1", max_tokens=1).choices


def test_schemas_are_compiled_one_at_a_time_beside_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = load(make_bytes_base(tmp_path, mask=True), device="cpu")
    constrain, may_go_on = Service._constrain, threading.Event()
    num_running: list[int] = []  # after every start and every end
    services: list[Service] = []

    def constrain_slowly(service: Service, prompts: Any, body: Any, *args: Any) -> Any:
        if body.response_format.type != "text":
            services.append(service)
            num_running.append((num_running or [0])[-1] + 1)
            may_go_on.wait(20)
            num_running.append(num_running[-1] - 1)
        return constrain(service, prompts, body, *args)

    monkeypatch.setattr(Service, "_constrain", constrain_slowly)
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
    with serving(masked, ReFusion()) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(complete, server, "1", extra_body={"response_format": form}) for _ in range(4)]
        wait_for(lambda: services and services[0]._num_preparing == 4)
        assert complete(server, "1+1", max_tokens=1).choices
        may_go_on.set()
        assert {answer.result().choices[0].text for answer in asked} == {"1"}
    assert max(num_running) == 1


def test_a_signal_lets_answers_end_and_refuses_others(model: TextModel) -> None:
    with serving(model, Autoregressive(), prepare=slow) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(complete, server, "1+1", max_tokens=40)
        wait_for(lambda: len(server.worker.active) == 1)
        server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.InternalServerError, match="stopping") as caught:
            complete(server, "1+2")
        assert caught.value.status_code == 503
        assert running.result().choices[0].text == decode_alone(model, Autoregressive(), "1+1", 40)
        wait_for(lambda: not server.started or server.should_exit)


def test_after_the_limit_of_draining_the_rest_gets_503(model: TextModel) -> None:
    with serving(model, Autoregressive(), prepare=slow, drain_seconds=0.1) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(complete, server, "1+1", max_tokens=450)
        wait_for(lambda: len(server.worker.active) == 1)
        server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.InternalServerError, match="stopping") as caught:
            running.result()
        assert caught.value.status_code == 503


@contextlib.contextmanager
def command(log: Path, *options: str) -> Iterator[str]:
    """Run ``refusion-lit serve``; yield its address, and check that it stops at SIGTERM."""
    log.touch()
    unlogged = logging.getLogger().handlers.clear  # pytest's
    process = start(["serve", "--port", "0", *options], log, unlogged)
    try:
        wait_for(lambda: "running on" in log.read_text() or not process.is_alive())
        yield log.read_text().partition("running on ")[2].split()[0]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert wait(process) == 0
    finally:
        process.kill()


def test_the_command_serves_without_its_directory_and_stops_at_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSION_LIT_API_KEY", "")
    directory, log = shutil.copytree(MODEL, tmp_path / "additions"), tmp_path / "log"
    with command(log, "--ckpt_path", str(directory), "--log_prompts", "false") as url:
        assert "serving additions with ReFusion\n" in log.read_text()
        shutil.rmtree(directory)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client:
            response = client.completions.create(model="additions", prompt="1+1", max_tokens=16)
        real = load(MODEL, device="cpu")
        assert response.choices[0].text == decode_alone(real, real.default_decoder, "1+1", 16)
    assert "done" in log.read_text()
    assert "1+1" not in log.read_text(), "logs have no prompts"
    assert repr(response.choices[0].text) not in log.read_text()


def test_the_command_serves_a_run_of_fit_and_logs_prompts_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSION_LIT_API_KEY", "")
    assert main(["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}"]) == 0
    run, log = tmp_path / "quickstart" / "version_0", tmp_path / "log"
    with (
        command(log, "--ckpt_path", str(run), "--log_prompts", "true") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client,
    ):
        response = client.completions.create(model="version_0", prompt="1+1", max_tokens=16)
    [expected] = load(run, device="cpu").generate(["1+1"], max_new_tokens=16)
    assert response.choices[0].text == expected.text
    assert "prompt=['1+1']" in log.read_text()
    assert f"answered: {[expected.text]}" in log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "host: .*REFUSION_LIT_API_KEY"),
        (["--port", "70000"], "port: .*65536, got 70000"),
        (["--max_waiting", "-1"], "max_waiting: .*at least 0, got -1"),
        (["--max_answer_tokens", "0"], "max_answer_tokens: .*at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The answer is the same without an API key and with an empty one."""
    monkeypatch.delenv("REFUSION_LIT_API_KEY", raising=False)
    assert main(["serve", "--ckpt_path", str(MODEL), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    monkeypatch.setenv("REFUSION_LIT_API_KEY", "")
    assert main(["serve", "--ckpt_path", str(MODEL), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
