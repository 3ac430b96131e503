"""Connections as an attacker, or a client in a hurry, uses them: slow, many, half-closed, never read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("openai", reason="needs openai: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")

from refusion_lit.cli import main
from refusion_lit.decoding import Autoregressive
from refusion_lit.serving import app
from refusion_lit.serving.app import Server
from refusion_lit.text_model import TextModel
from support.forks import start, wait
from support.servers import MODEL, NAME, address, raw, serving, slow, wait_for

HEAD = "POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
PARTS = ["", "GET / HTTP/1.1\n", f"{HEAD}Content-Length: 500\n\n{{", f"{HEAD}Transfer-Encoding: chunked\n\n5\n{{"]


def post(version: str = "1.1", **options: Any) -> str:
    body = json.dumps({"model": NAME, "prompt": "1+1", **options})
    return f"{HEAD.replace('1.1', version)}Content-Length: {len(body)}\n\n{body}"


def read(connection: socket.socket, seconds: float = 20.0) -> bytes:
    """Return all that a server sends until it closes the connection, soon after the last byte."""
    connection.settimeout(seconds)
    received = b""
    last = math.inf
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
            last = time.monotonic()
    assert time.monotonic() < last + 4, "the connection was kept alive"
    return received


def get_error(answer: bytes) -> tuple[int, str]:
    """Return the status and the message of an error in OpenAI's form; a probe may come before it."""
    head, _, body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == int(head.split()[1])
    return error["code"], error["message"]


def get_health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("max_connections", [20, 1000])
def test_300_slow_connections_keep_nobody_out(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, max_connections: int
) -> None:
    """Beyond the limit, new connections take the place of slow ones. A slow connection is closed after a time, too."""
    monkeypatch.setattr(app, "MAX_CONNECTIONS", max_connections)
    with serving(model, key="secret", max_seconds=2.0) as server, contextlib.ExitStack() as stack:
        slow_ones = [stack.enter_context(raw(server, PARTS[i % len(PARTS)])) for i in range(300)]
        assert get_health(address(server)) == 200
        assert len(server.server_state.connections) <= max_connections + 1
        with raw(server, HEAD.replace("POST /v1/completions", "GET /v1/models") + "Connection: close\n\n") as another:
            assert get_error(read(another))[0] == 401
        wait_for(lambda: not server.server_state.connections, 10)
        answers = [read(connection) for connection in slow_ones]
        assert get_health(address(server)) == 200
    errors = [get_error(answer) for answer in answers if b" 401 " not in answer]
    assert {status for status, _ in errors} <= {408, 503}
    statuses = [status for status, _ in errors]
    assert statuses.count(408) <= max_connections
    if max_connections > 300:
        assert statuses.count(503) == 0
    assert all("within 2 s" in message for status, message in errors if status == 408)


def test_bytes_that_trickle_in_do_not_prolong_the_limit(model: TextModel) -> None:
    with serving(model, max_seconds=1.0) as server:
        for text in (HEAD, f"{HEAD}Content-Length: 500\n\n"):
            with raw(server, text) as connection:
                started = time.monotonic()
                with contextlib.suppress(OSError):
                    while time.monotonic() < started + 4:
                        connection.sendall(b"1")
                        time.sleep(0.1)
                assert time.monotonic() < started + 3
            assert get_health(address(server)) == 200


def test_a_server_that_stands_still_does_not_blame_its_clients(model: TextModel) -> None:
    """The time in which a process is suspended or a machine overloaded does not count for a client's time limit."""
    with (
        serving(model, max_seconds=3.0) as server,
        raw(server, "GET /health HTTP/1.1\nHost: localhost\n") as connection,
    ):
        wait_for(lambda: server.server_state.connections)
        [protocol] = server.server_state.connections
        goes_on = threading.Event()
        protocol.loop.call_soon_threadsafe(lambda: (time.sleep(6), goes_on.set()))
        assert goes_on.wait(60)
        time.sleep(0.5)  # a time limit that is over has had its effect by then
        connection.sendall(b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert read(connection).startswith(b"HTTP/1.1 200")


def test_a_connection_in_use_is_not_closed_but_further_ones_get_503(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_CONNECTIONS", 2)
    with serving(model, Autoregressive(), prepare=slow, max_seconds=30.0) as server, contextlib.ExitStack() as stack:
        asked = post(stream=True, max_tokens=60)
        streams = [stack.enter_context(raw(server, asked.replace("\nHost", "\nConnection: close\nHost"))) for _ in "ab"]
        wait_for(lambda: len(server.worker.active) == 2)
        for _ in range(3):
            with raw(server, "GET /health HTTP/1.1\nHost: localhost\n\n") as another:
                status, message = get_error(read(another))
            assert (status, "connections" in message) == (503, True)
        assert all(b"[DONE]" in read(stream) for stream in streams)
        assert get_health(address(server)) == 200


def test_requests_one_after_the_other_on_a_connection_have_a_limit_each(model: TextModel) -> None:
    get = "GET /health HTTP/1.1\nHost: localhost\n\n"
    with serving(model, max_seconds=1.0) as server, raw(server, get) as connection:
        for _ in range(4):
            time.sleep(0.4)
            connection.sendall(get.replace("\n", "\r\n").encode())
        connection.sendall(b"GET")
        answer = read(connection)
        assert answer.count(b" 200 OK") == 5
        assert answer.count(b" 408 ") == 1


def test_an_idle_connection_outlives_the_limit_of_a_request_and_is_closed_without_an_error(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client would take the error for the answer to its next request."""
    monkeypatch.setattr(app, "_IDLE_SECONDS", 3)
    get = "GET /health HTTP/1.1\nHost: localhost\n\n"
    with serving(model, max_seconds=1.0) as server, raw(server, get) as connection:
        time.sleep(2)
        connection.sendall(get.replace("\n", "\r\n").encode())
        answer = read(connection)
        assert answer.count(b"HTTP/1.1") == answer.count(b" 200 OK") == 2


def test_the_key_is_checked_before_the_body_is_read(model: TextModel) -> None:
    with serving(model, key="secret") as server:
        for body in ("Content-Length: 500000\n\n", "Content-Length: 9\n\n{", "Transfer-Encoding: chunked\n\n"):
            for sent in ("", "Authorization: Bearer x\n", "Authorization: Basic secret\n"):
                with raw(server, HEAD + sent + body) as connection:
                    assert b" 401 " in connection.makefile("rb").readline()
        with raw(server, f"{HEAD}Connection: close\nContent-Length: 900000\n\n") as connection:
            connection.sendall(b"1" * 900_000)  # all of it first, as Python's urllib does
            assert get_error(read(connection))[0] == 401


def test_a_client_that_closes_its_writing_half_gets_its_answers(model: TextModel) -> None:
    with serving(model, Autoregressive(), prepare=lambda worker: slow(worker, 0.01)) as server:
        [row] = model.generate(["1+1"], decoder=Autoregressive(), max_new_tokens=16)
        for stream in (False, True):
            for times in (1, 3):  # pipelined
                with raw(server, post(stream=stream) * times) as connection:
                    connection.shutdown(socket.SHUT_WR)
                    answer = read(connection)
                assert answer.count(b" 200 OK") == times
                assert answer.count(b"[DONE]") == stream * times
                if not stream:
                    text = json.loads(answer.rpartition(b"\r\n\r\n")[2])["choices"][0]["text"]
                    assert text == row.text
        with raw(server, "GET /v1/models HTTP/1.1\nHost: localhost\n\n") as connection:
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 OK" in read(connection)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_both_halves_frees_its_row_and_its_place(
    model: TextModel, stream: bool, version: str
) -> None:
    with serving(model, Autoregressive(), rows=1, prepare=lambda worker: slow(worker, 0.1)) as server:
        asked = post(version, stream=stream, max_tokens=450)
        first, second = raw(server, asked), raw(server, asked)
        wait_for(lambda: len(server.worker.active) == len(server.worker.waiting) == 1)
        second.close()
        wait_for(lambda: not server.worker.waiting, 5)
        first.close()
        wait_for(lambda: not server.worker.active, 5)
        wait_for(lambda: not server.server_state.connections, 5)


def test_an_answer_that_nobody_reads_is_given_up(model: TextModel) -> None:
    with serving(model, Autoregressive(), max_seconds=1.0) as server:
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        page = "GET / HTTP/1.1\nHost: localhost\n\n"
        with raw(server, page * 50, buffer=4096):
            wait_for(lambda: server.server_state.connections)
            wait_for(lambda: not server.server_state.connections, 10)


def test_a_client_that_reads_an_answer_late_may_send_a_further_request(model: TextModel) -> None:
    """The time limit for reading is not the time for which a connection may be idle."""
    with serving(model, max_seconds=1.0) as server:
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with raw(server, "GET / HTTP/1.1\nHost: localhost\n\n", buffer=4096) as connection:
            time.sleep(0.2)
            received = b""
            while not received.endswith(b"</html>\n"):
                received += connection.recv(4096)
            time.sleep(1.2)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 OK" in connection.recv(4096)


@pytest.mark.parametrize("path", ["/v1/models/", "/metrics/", "/health/", "/v1/chat/completions/", "//evil.example"])
def test_no_path_is_redirected(model: TextModel, path: str) -> None:
    with (
        serving(model, key="secret") as server,
        raw(
            server, f"GET {path} HTTP/1.1\nHost: evil.example\nAuthorization: Bearer secret\nConnection: close\n\n"
        ) as it,
    ):
        assert get_error(read(it))[0] == 404


def test_every_error_has_openais_form(server: Server) -> None:
    requests = {
        "GET / HTTP/1.1\nHost: evil.example\n\n": 400,
        "GET / HTTP/1.1\nHost: 127.0.0.1.evil.example\n\n": 400,
        "GET / HTTP/1.1\n\n": 400,
        "nonsense\n\n": 400,
        "GET / HTTP/1.1\nHost: localhost\nContent-Length: x\n\n": 400,
        "GET /\x01 HTTP/1.1\nHost: localhost\n\n": 400,
        f"{HEAD}Content-Length: 2\nContent-Length: 3\n\n{{}}": 400,
        "PUT / HTTP/1.1\nHost: localhost\nConnection: close\n\n": 405,
        "GET /v1/models/other HTTP/1.1\nHost: localhost\nConnection: close\n\n": 404,
        "GET /ws HTTP/1.1\nHost: localhost\nUpgrade: websocket\nConnection: Upgrade, close\n\n": 404,
        f"{HEAD.replace('application/json', 'text/plain')}Connection: close\nContent-Length: 2\n\n{{}}": 400,
    }
    for request, expected in requests.items():
        with raw(server, request) as connection:
            connection.shutdown(socket.SHUT_WR)
            status, message = get_error(read(connection))
        assert status == expected, request
        assert "b'" not in message
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8000", "[::1]"):
        for path in ("/", "/health"):
            with raw(server, f"HEAD {path} HTTP/1.1\nHost: {host}\nConnection: close\n\n") as connection:
                assert b" 200 OK" in read(connection), host


def test_openais_client_retrieves_the_model(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve(NAME) == client.models.list().data[0]
        with pytest.raises(openai.NotFoundError, match="other"):
            client.models.retrieve("other")


@pytest.mark.parametrize("key", [" ", "secret\n", "a b", "é", "\ttab", "nul\x7f"])
def test_a_key_that_no_client_can_send_is_refused(key: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("REFUSION_LIT_API_KEY", key)
    assert main(["serve", "--ckpt_path", str(MODEL), "--host", "0.0.0.0"]) == 2
    error = capsys.readouterr().err
    assert "REFUSION_LIT_API_KEY: expected" in error
    assert "secret" not in error


@contextlib.contextmanager
def serve(log: Path, *options: str) -> Any:
    """Run ``refusion-lit serve`` in a process; yield it and its port."""
    log.touch()
    process = start(["serve", "--ckpt_path", str(MODEL), "--port", "0", *options], log, lambda: None)
    try:
        wait_for(lambda: "running on" in log.read_text() or not process.is_alive())
        url = log.read_text().partition("running on ")[2].split()[0]
        wait_for(lambda: get_health(url) == 200)
        yield process, int(url.rpartition(":")[2])
    finally:
        process.kill()


def test_a_second_signal_stops_at_once_and_the_exit_status_says_that_answers_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSION_LIT_API_KEY", "")
    log = tmp_path / "log"
    options = ("--max_answer_tokens", "500", "--batch_size", "1", "--drain_seconds", "60")
    with serve(log, *options) as (process, port), contextlib.ExitStack() as stack:
        body = json.dumps(
            {"model": MODEL.name, "prompt": "1+1", "n": 16, "stream": True, "max_tokens": 400, "temperature": 5}
        )
        request = f"{HEAD}Content-Length: {len(body)}\n\n{body}".replace("\n", "\r\n").encode()
        streams = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
        for stream in streams:
            stream.sendall(request)
            assert b" 200 OK" in stream.recv(4096)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.2)
        assert process.is_alive(), "answers are in flight"
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(read, stream) for stream in streams]
            started = time.monotonic()
            os.kill(process.pid, signal.SIGTERM)
            assert wait(process) == 3
            assert time.monotonic() < started + 6, "much less where nothing else runs"
            for received in [answer.result() for answer in answers]:
                assert b"[DONE]" not in received
                assert b"the server is stopping" in received or not received.endswith(b"0\r\n\r\n")
    assert "answers" in log.read_text().splitlines()[-1]


def test_with_few_open_files_many_connections_stop_nobody_and_an_idle_server_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an interpreter that starts and ends as users' do: the limit of open files is read at its start."""
    monkeypatch.setenv("REFUSION_LIT_API_KEY", "")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "refusion_lit.cli", "serve", "--ckpt_path", str(MODEL), "--port", "0"]

    def lower_limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=lower_limit)
    try:
        wait_for(lambda: "running on" in log.read_text() or process.poll() is not None, 300)
        url = log.read_text().partition("running on ")[2].split()[0]
        wait_for(lambda: get_health(url) == 200)
        port = int(url.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.sendall(b"GET / HTTP/1.1\r\n")
            assert get_health(url) == 200
        assert "Traceback" not in log.read_text()
        before = read_cpu_seconds(process.pid)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        assert usage.ru_utime + usage.ru_stime < before + 1
        assert time.monotonic() < started + 20, "about a second where nothing else runs"
    finally:
        process.kill()
        process.wait()


def read_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_answers_that_end_in_time_leave_status_0_and_those_cut_by_the_limit_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSION_LIT_API_KEY", "")
    for drain, num_choices, expected in (("60", 1, 0), ("0", 16, 3)):
        with serve(tmp_path / f"log{drain}", "--drain_seconds", drain, "--batch_size", "1") as (process, port):
            options = {"n": num_choices, "stream": True, "max_tokens": 400, "temperature": 5}
            body = json.dumps({"model": MODEL.name, "prompt": "1+1", **options})
            with socket.create_connection(("127.0.0.1", port)) as stream:
                stream.sendall(f"{HEAD}Content-Length: {len(body)}\n\n{body}".replace("\n", "\r\n").encode())
                assert b" 200 OK" in stream.recv(4096)
                os.kill(process.pid, signal.SIGTERM)
                assert wait(process) == expected
                assert (b"[DONE]" in read(stream)) == (expected == 0)
