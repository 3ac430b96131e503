"""The HTTP application and the process around it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from refusion_lit.serving.guard import Guard
from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, RequestError, parse
from refusion_lit.serving.service import Service

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

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.stop)

    # The framework's own pages load scripts from elsewhere.
    app = FastAPI(title="refusion-lit", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(Guard, key=key, max_body=service.limits.max_body_bytes)
    page = files("refusion_lit.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(parse(ChatRequest, await request.body()), request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await service.answer(parse(CompletionRequest, await request.body()), request)

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": service.name, "object": "model", "created": service.created, "owned_by": "refusion-lit"}
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/health")
    async def health() -> Response:
        worker = service.worker
        state = "stopping" if worker.is_draining else "ready" if worker.is_ready else "loading"
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def show() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    return app


class Server(uvicorn.Server):
    """Runs the application. On SIGTERM or Ctrl-C it finishes what is in flight, within a limit, and refuses the rest.

    Args:
        app: The application.
        service: Its service.
        host: Address to bind.
        port: Port to bind; 0: any free one.
        drain_seconds: How long answers in flight may still take; what is left then gets 503.
    """

    def __init__(self, app: FastAPI, service: Service, host: str, port: int, drain_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, server_header=False,
                           timeout_graceful_shutdown=5)
        )  # fmt: skip
        self.service = service
        self.drain_seconds = drain_seconds
        self._drain_until: float | None = None
        self.announce = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind, and say where."""
        await super().startup(sockets)
        if self.started and self.announce:
            sys.stderr.write(f"serving {self.announce} at {self.address}\n")

    @property
    def address(self) -> str:
        """Where it listens, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin to drain; at the second signal, stop at once."""
        if self._drain_until is not None:
            self.should_exit = True
        self.drain()

    def drain(self) -> None:
        """Refuse further requests, and stop when those in flight are done or their time is over."""
        self.service.worker.drain()
        self._drain_until = self._drain_until or time.monotonic() + self.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Stop when everything is drained."""
        if self._drain_until is not None:
            worker = self.service.worker
            is_done = not (worker.num_active or worker.num_waiting)
            if is_done or time.monotonic() > self._drain_until:
                await asyncio.to_thread(worker.stop)
                self.should_exit = True
        return await super().on_tick(counter)
