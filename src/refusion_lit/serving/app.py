"""The HTTP application: its routes, and the process around it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, error_body, message_of
from refusion_lit.serving.service import Service

API_KEY = "REFUSION_LIT_API_KEY"
"""Environment variable with the key that clients must send."""
LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(service: Service, *, key: str | None = None) -> FastAPI:
    """Return the application.

    Without a key, it serves requests that name this machine only, so that no page of another site can reach it through
    a name that it made point here. Bodies must be declared as JSON, which such a page cannot do without asking first.

    Args:
        service: Answers the requests.
        key: The API key that clients must send, but for the page and ``/health``; ``None``: none.
    """
    worker = service.worker

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.thread.start()
        yield
        await asyncio.to_thread(worker.stop)

    # The framework's own pages load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(_BodyLimit, max_body_size=worker.limits.max_body_bytes)
    if key is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL)
    page = files("refusion_lit.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        # A body without a declared length is counted while it is read.
        return _error(_too_large(worker.limits.max_body_bytes) if error.status_code == 413 else error)

    @app.exception_handler(RequestValidationError)
    async def refuse_field(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, HTTPException(400, message_of(error)))

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        return _error(HTTPException(500, f"the request failed ({type(error).__name__})"))  # the log has the rest

    @app.get("/health")
    async def health() -> Response:
        state = "stopping" if worker.is_draining else "ready" if worker.is_ready else "loading"
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    @app.get("/")
    async def show() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    app.include_router(_api(service, key))
    return app


class _BodyLimit(RequestBodyLimitMiddleware):
    """Refuses bodies by their declared length in the form of all errors, and others once too much was read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if declared.isdecimal() and int(declared) > self.max_body_size:
            await _error(_too_large(self.max_body_size))(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"body: expected at most {limit} bytes, got more; shorten it.")


def _error(error: HTTPException) -> Response:
    return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)


def _api(service: Service, key: str | None) -> APIRouter:
    """Return the routes that need the key."""

    async def check_key(given: _Credentials) -> None:
        if key and not (given and hmac.compare_digest(given.credentials.encode(), key.encode())):
            raise HTTPException(401, "authorization: expected the API key, got none or another; send it as a bearer.")

    api = APIRouter(dependencies=[Depends(check_key)])

    @api.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await service.answer(asked, request)

    @api.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await service.answer(asked, request)

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": service.name, "object": "model", "created": 0, "owned_by": "refusion-lit"}
        return {"object": "list", "data": [card]}

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    return api


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
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin to drain; at the second signal, stop at once."""
        self.should_exit = self._drain_until is not None
        self.drain()

    def drain(self) -> None:
        """Refuse further requests, and stop when those in flight are done or their time is over."""
        self.worker.is_draining = True
        self._drain_until = self._drain_until or time.monotonic() + self.worker.limits.drain_seconds

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
