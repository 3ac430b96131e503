"""A server in a thread of the test, for a tiny model; it listens on 127.0.0.1 and stops with the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from refusion_lit.serving import Limits
from refusion_lit.serving.app import Server, build_app
from refusion_lit.serving.service import Service
from refusion_lit.serving.worker import Worker
from refusion_lit.text_model import TextModel
from refusion_lit.types import DecodingOptions, SamplingParams

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
NAME = "additions"


@contextmanager
def serving(
    model: TextModel,
    decoder: Any = None,
    key: str | None = None,
    rows: int = 4,
    prepare: Callable[[Worker], None] = lambda worker: None,
    separate_reasoning: bool = False,
    **limits: Any,
) -> Iterator[Server]:
    """Run a server.

    Args:
        model: The model to serve.
        decoder: The decoder; by default the model's.
        key: The API key that requests must have.
        rows: Maximum number of requests in flight.
        prepare: Changes the worker before it starts, for example to make the model slow or faulty.
        separate_reasoning: Whether thoughts are returned in a field of their own.
        limits: Fields of ``Limits``.
    """
    all_limits = Limits(**{"drain_seconds": 5.0} | limits)
    sampling = SamplingParams(max_new_tokens=16)
    options = DecodingOptions(batch_size=rows)
    worker = Worker(model, decoder or model.default_decoder, sampling, options, all_limits)
    prepare(worker)
    service = Service(worker, NAME, separate_reasoning=separate_reasoning)
    server = Server(build_app(service, key=key), service, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started and worker.is_ready)
    try:
        yield server
    finally:
        worker.drain(all_limits.drain_seconds)
        thread.join(timeout=60)
        assert not thread.is_alive()


def slow(worker: Worker, seconds: float = 0.02) -> None:
    """Let every forward pass take longer: its LM head sleeps first."""
    make_head = worker.checked_model.head_runner

    def run_slowly(head: Callable[[Any], Any], hidden: Any) -> Any:
        time.sleep(seconds)
        return head(hidden)

    worker.checked_model.head_runner = lambda: partial(run_slowly, make_head())


def wrap_body(worker: Worker, run: Callable[..., Any]) -> None:
    """Let every forward pass run a function, which gets the body's own forward pass and the inputs."""
    make_body = worker.checked_model.runner
    worker.checked_model.runner = lambda: partial(run, make_body())


def wait_for(is_met: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


def address(server: Server) -> str:
    """Return the URL of a server that has started."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://{host}:{port}"


def raw(server: Server, text: str, buffer: int | None = None) -> socket.socket:
    """Return a connection on which a text was sent; ``buffer`` is about how many received bytes it holds."""
    port = int(address(server).rpartition(":")[2])
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", port))
    connection.sendall(text.replace("\n", "\r\n").encode())
    return connection
