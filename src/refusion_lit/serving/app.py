"""The HTTP application and the server process."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import resource
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from refusion_lit.data.tokenizers import alphabet
from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, error_body
from refusion_lit.serving.service import Service
from refusion_lit.serving.worker import log

API_KEY = "REFUSION_LIT_API_KEY"
"""Environment variable with the API key that clients must send."""
_STOP_SECONDS = 0.5
"""Seconds for a running model call and open streams to end after a second signal."""
_REQUEST_SECONDS = 30.0
"""Maximum time in which a client must send a whole request, unless ``max_seconds`` is less."""
_IDLE_SECONDS = 20
"""Time after which the server closes a connection without a further request. OpenAI's client keeps a connection idle
for 5 s and aiohttp for 15 s: a server that closes it at the same moment loses a request."""
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_CONNECTIONS = max((_FILES - 64) // 2, 8) if 0 <= _FILES < 2048 else 1024
"""Maximum number of open connections: about half of the files that the process may have open."""
_BACKLOG = max(MAX_CONNECTIONS // 4, 1)
"""Connections that the event loop accepts at once, before it can refuse any."""
_TOO_MANY = "the server has too many connections; try again later."
_OPEN_PATHS = ("/", "/health")
"""Paths that need no API key."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")
"""Host headers that are accepted when no API key is set."""
_read_bearer = HTTPBearer(auto_error=False)
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(service: Service, *, key: str | None = None) -> FastAPI:
    """Return the FastAPI application that serves a service's model.

    Without a key, the application answers only requests whose host is this machine. This prevents DNS rebinding: a page
    of another site cannot reach the server through a host name that points here. Bodies must be declared as JSON, which
    other sites' pages cannot send without a preflight request.

    Args:
        service: Answers the requests.
        key: API key that clients must send, except for the page and ``/health``; ``None`` or empty: no key.
    """
    worker = service.worker

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.thread.start()
        yield
        worker.drain(0.0)
        await asyncio.to_thread(worker.thread.join, worker.grace_seconds)

    handlers: Any = dict.fromkeys((HTTPException, Exception), _refuse)
    # FastAPI's documentation pages are off: they load scripts from a CDN.
    # So are redirects of paths that end with a slash: they would name any host that a request names.
    app = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan,
        exception_handlers=handlers,
    )  # fmt: skip
    app.add_middleware(_refuse_bad_requests, key=key, max_bytes=worker.limits.max_body_bytes)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        state = "stopping" if worker.is_draining else "ready" if worker.is_ready else "loading"
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def show() -> Response:
        return FileResponse(Path(__file__).with_name("page.html"), headers={"Content-Security-Policy": _PAGE_POLICY})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(ChatRequest, request)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        return await service.respond(request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await service.answer(CompletionRequest, request)

    tokenizer = service.model.tokenizer
    card = {"id": service.name, "object": "model", "created": 0, "owned_by": "refusion-lit"}
    # For the page, which sends no history to a model without a chat template.
    card |= {"has_chat_template": bool(tokenizer.chat_template), "characters": alphabet(tokenizer)}
    card |= {"decoder": type(worker.decoder).__name__}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return card

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Return an error response in OpenAI's form; details of unexpected errors go to the log only."""
    if isinstance(error, HTTPException) and error.detail == STATUS_PHRASES[error.status_code].decode():  # no route
        paths = [f"{method} {route.path}" for route in request.app.routes for method in sorted(route.methods)]
        got = f"{request.method[:20]} {request.url.path[:60]}"
        detail = f"path: expected {', '.join(paths)}, got {got}; this server has no other paths."
        error = HTTPException(error.status_code, detail, error.headers)
    elif not isinstance(error, HTTPException):
        error = HTTPException(500, f"the request failed ({type(error).__name__})")
    return JSONResponse(error_body(error), error.status_code, error.headers)


def _refuse_bad_requests(app: ASGIApp, key: str | None, max_bytes: int) -> ASGIApp:
    """Wrap an application: refuse wrong requests before their bodies are read, and bodies that are too large.

    Args:
        app: The application that gets the other requests.
        key: The API key. Without a key, the host must be this machine.
        max_bytes: Maximum size of a body, by the declared length or by the number of bytes read.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan
            await app(scope, receive, send)
            return
        scope.setdefault("state", {})["arrived"] = time.monotonic()
        headers = Headers(raw=scope["headers"])
        num_read = 0

        async def drain() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):  # closing a connection with unread data may lose the answer
                    while headers.get("connection") == "close" and (await receive()).get("more_body"):
                        pass

        async def receive_within_limit() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > max_bytes:
                await drain()
                raise _body_too_large(max_bytes)
            return message

        try:
            await _check_head(Request(scope), key, max_bytes)
        except HTTPException as error:
            await drain()
            await JSONResponse(error_body(error), error.status_code, error.headers)(scope, receive, send)
        else:
            await app(scope, receive_within_limit, send)

    return run


async def _check_head(request: Request, key: str | None, max_bytes: int) -> None:
    """Refuse a request by its head.

    Raises:
        HTTPException: If the host or the API key is wrong, or the declared body is too large.
    """
    host = request.headers.get("host", "").lower()
    if not key and host not in LOCAL_HOSTS and host.rpartition(":")[0] not in LOCAL_HOSTS:
        raise HTTPException(400, f"host: expected {LOCAL_HOSTS[0]}, as the server has no API key, got {host[:60]!r}.")
    if key and request.scope["path"] not in _OPEN_PATHS:
        sent = await _read_bearer(request)
        if not (sent and hmac.compare_digest(sent.credentials.encode(), key.encode())):
            message = "authorization: expected the API key, got none or another; send it as a bearer."
            raise HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise _body_too_large(max_bytes)


def _body_too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"body: expected at most {max_bytes} bytes, got more; shorten it.")


async def _answer_busy(scope: Scope, receive: Receive, send: Send) -> None:
    error = HTTPException(503, _TOO_MANY, headers={"Retry-After": "1", "Connection": "close"})
    await JSONResponse(error_body(error), error.status_code, error.headers)(scope, receive, send)


class Connection(H11Protocol):
    """A connection with time limits. A client may close its writing half after a request and still gets the answer.

    The number of open connections is limited. At the limit, a new connection replaces the connection that has waited
    longest for a complete request. If every connection has a request in progress, the new connection gets status 503.

    Args:
        max_seconds: Time for a client to go on reading an answer. Sending a request may take as long, but at most 30 s.
    """

    def __init__(
        self, *, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None, max_seconds: float,
    ) -> None:  # fmt: skip
        super().__init__(config, server_state, app_state, _loop)
        self.request_seconds = min(max_seconds, _REQUEST_SECONDS)
        self.answer_seconds = max_seconds
        self.state: Literal["idle", "waiting", "stalled", "busy"] | None = None
        self.since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection, or refuse it."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
            waiting = [other for other in others if other.is_waiting and other.app is not _answer_busy]
            if waiting:
                min(waiting, key=lambda other: other.since).refuse(503, _TOO_MANY)
            elif len(self.connections) > MAX_CONNECTIONS + _BACKLOG:
                transport.abort()
            else:
                self.app = _answer_busy
                self.request_seconds = min(self.request_seconds, 1.0)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self.state = None  # the time limit of the next state starts
        self._follow()
        if self._is_half_closed and self.is_waiting:
            self.transport.close()

    def pause_writing(self) -> None:
        """Limit the time in which the client must read."""
        super().pause_writing()
        self._follow()

    def resume_writing(self) -> None:
        """Lift the limit."""
        super().resume_writing()
        self._follow()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open if an answer is due; send a probe to detect a client that has left."""
        is_due = self.is_answering and self.scope["http_version"] == "1.1"
        if is_due and not self._is_half_closed:
            self._is_half_closed = True
            event: h11.Event | None = None
            if not self.cycle.response_started:
                event = h11.InformationalResponse(status_code=100, headers=[], reason=STATUS_PHRASES[100])
            elif self.scope.get("state", {}).get("is_stream"):
                event = h11.Data(data=b":\n\n")  # a comment
            self.transport.write((event and self.conn.send(event)) or b"")
            self._check_reset()
        return is_due

    def _check_reset(self) -> None:
        """Close the connection once the client has answered the probe with a reset, which asyncio does not notice."""
        if self.is_answering and not self.transport.is_closing():
            if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
            else:
                self.loop.call_later(0.1, self._check_reset)

    @property
    def is_answering(self) -> bool:
        """Whether the answer to a complete request is due."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """Whether no complete request has arrived since the last answer."""
        return self.state in ("idle", "waiting")

    def _follow(self) -> None:
        """Update the state; start the time limit of a new state."""
        state: Literal["idle", "waiting", "stalled", "busy"]
        if self.is_answering:
            state = "stalled" if self.flow.write_paused else "busy"
        else:  # idle: after an answer, without any part of a further request
            is_between = self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.IDLE
            state = "idle" if is_between and not self.conn.trailing_data[0] else "waiting"
        if state == self.state:
            return
        self.state, self.since = state, time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
        is_unread = state == "stalled" or self.transport.get_write_buffer_size() > 0
        if state != "busy":
            seconds = _IDLE_SECONDS if state == "idle" else self.request_seconds
            # While the client still reads its answer, it keeps the time for reading.
            unread_seconds = max(self.answer_seconds, _IDLE_SECONDS) if state == "idle" else self.answer_seconds
            self._set_timer(unread_seconds if is_unread else seconds)

    def _set_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._expire, self.loop.time() + seconds)

    def _expire(self, due: float) -> None:
        late = self.loop.time() - due
        if late > 1.0:  # the server stood still, so the client gets this time back
            self._set_timer(late)
        elif self.state == "stalled":
            self.transport.abort()
        elif self.state == "idle":  # without an error, which the client would take for the answer to its next request
            is_unread = self.transport.get_write_buffer_size() > 0
            (self.transport.abort if is_unread else self.transport.close)()
        elif self.state == "waiting":
            expected = f"expected all of it within {self.request_seconds:g} s"
            self.refuse(408, f"request: {expected}, got a part or nothing; send it again.")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse bytes that are not HTTP."""
        self.refuse(400, "request: expected HTTP/1.1, got something else; correct the request.")

    def refuse(self, status: int, message: str) -> None:
        """Send an error, unless an answer has begun, and close the connection."""
        log.debug("closing a connection that was %s for %.1f s: %s", self.state, time.monotonic() - self.since, message)
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = JSONResponse(error_body(HTTPException(status, message)), status, {"Connection": "close"})
            head = h11.Response(status_code=status, headers=response.raw_headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        is_unread = self.transport.get_write_buffer_size() > 0  # by a client that may never read it
        (self.transport.abort if is_unread else self.transport.close)()
        self.connections.discard(self)  # it closes in the next tick, but counts no longer

    def shutdown(self) -> None:
        """Close the connection as soon as no answer is due."""
        if self.is_answering:
            super().shutdown()
        elif not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """Runs the application until SIGTERM or Ctrl-C; answers in flight may then finish within a time limit.

    Args:
        app: The application.
        service: The application's service.
        host: Address to bind.
        port: Port to bind; 0: any free one.
    """

    def __init__(self, app: FastAPI, service: Service, host: str, port: int) -> None:
        self.worker = service.worker
        connection: Any = partial(Connection, max_seconds=self.worker.limits.max_seconds)
        options: dict[str, Any] = {"host": host, "port": port, "http": connection, "backlog": _BACKLOG}
        options["timeout_keep_alive"] = _IDLE_SECONDS
        super().__init__(uvicorn.Config(app, loop="asyncio", ws="none", access_log=False, **options))
        self._num_aborted = 0
        self._abort_at = math.inf

    @property
    def num_cut(self) -> int:
        """Number of answers that the server cut short by stopping."""
        return self.worker.num_cut or self._num_aborted

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain at the first signal; stop at the second."""
        if self.worker.is_draining:
            self.should_exit = True
            self._abort_at = time.monotonic() + _STOP_SECONDS
            self.worker.grace_seconds = _STOP_SECONDS
        self.worker.drain(0.0 if self.should_exit else self.worker.limits.drain_seconds)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a long queue, from which the event loop accepts a few connections at once."""
        await super().startup(sockets)
        for listener in [listener for server in getattr(self, "servers", []) for listener in server.sockets]:
            with socket.fromfd(listener.fileno(), listener.family, listener.type) as copy:
                copy.listen(2048)

    async def on_tick(self, counter: int) -> bool:
        """Stop when the engine's thread has ended or hangs in a model call."""
        hangs = time.monotonic() > self.worker.stop_at + self.worker.grace_seconds
        self.should_exit = self.should_exit or hangs or not self.worker.thread.is_alive()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give answers in flight time to finish, then close all connections."""
        self._abort_at = min(self._abort_at, time.monotonic() + self.worker.grace_seconds)
        closing = asyncio.ensure_future(super().shutdown(sockets))
        while not (await asyncio.wait({closing}, timeout=0.1))[0]:
            connections = list(self.server_state.connections) if time.monotonic() > self._abort_at else []
            for connection in connections:
                self._num_aborted += isinstance(connection, Connection) and connection.is_answering
                connection.transport.abort()
        await closing
