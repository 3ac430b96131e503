"""The HTTP application: its door, its routes, and the process around it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from types import FrameType

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import generate_latest

from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, RequestError, parse
from refusion_lit.serving.service import Service

API_KEY = "REFUSION_LIT_API_KEY"
"""Environment variable with the key that clients must send."""
LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")
_OPEN = ("/", "/health")
"""Paths that need no key: the page, which asks for it, and what a load balancer reads."""
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(service: Service, *, key: str | None = None) -> FastAPI:
    """Return the application.

    Args:
        service: Answers the requests.
        key: The API key that clients must send; ``None``: none.
    """

    async def door(request: Request) -> None:
        _check(request, key)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.thread.start()
        yield
        await asyncio.to_thread(service.worker.stop)

    # The framework's own pages load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, dependencies=[Depends(door)])
    max_body = service.limits.max_body_bytes
    page = files("refusion_lit.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(parse(ChatRequest, await _body(request, max_body)), request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await service.answer(parse(CompletionRequest, await _body(request, max_body)), request)

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": service.name, "object": "model", "created": 0, "owned_by": "refusion-lit"}
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/health")
    async def health() -> Response:
        worker = service.worker
        state = "stopping" if worker.is_draining else "ready" if worker.is_ready else "loading"
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def show() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    return app


def _check(request: Request, key: str | None) -> None:
    """Refuse a request before its body is read.

    Without a key, only requests addressed to this machine by a local name are served, so that no page of another site
    can reach the server through a name that it made point here. Bodies must be declared as JSON, which a page of
    another site cannot do without asking first.
    """
    headers = request.headers
    if key is None:
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in LOCAL:
            raise RequestError(403, f"host: expected one of {', '.join(LOCAL)}; set {API_KEY} to serve others.")
    elif request.url.path not in _OPEN:
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, key.encode()):
            raise RequestError(401, "authorization: expected the API key as a bearer token.")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise RequestError(415, "content-type: expected application/json.")


async def _body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise RequestError(413, f"body: expected at most {max_bytes} bytes; send less.")
    return bytes(body)


class Server(uvicorn.Server):
    """Runs the application. On SIGTERM or Ctrl-C it finishes what is in flight, within a limit, and refuses the rest.

    Args:
        app: The application.
        service: Its service.
        host: Address to bind.
        port: Port to bind; 0: any free one.
    """

    def __init__(self, app: FastAPI, service: Service, host: str, port: int) -> None:
        super().__init__(uvicorn.Config(app, host=host, port=port, access_log=False, timeout_graceful_shutdown=5))
        self.worker = service.worker
        self.drain_seconds = service.limits.drain_seconds
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin to drain; at the second signal, stop at once."""
        self.should_exit = self._drain_until is not None
        self.drain()

    def drain(self) -> None:
        """Refuse further requests, and stop when those in flight are done or their time is over."""
        self.worker.is_draining = True
        self._drain_until = self._drain_until or time.monotonic() + self.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Stop when everything is drained, or the engine has failed for good."""
        if self.worker.has_failed:
            self.drain()
        if self._drain_until is not None:
            is_done = not (self.worker.num_active or self.worker.num_waiting)
            if is_done or time.monotonic() > self._drain_until:
                await asyncio.to_thread(self.worker.stop)
                self.should_exit = True
        return await super().on_tick(counter)
