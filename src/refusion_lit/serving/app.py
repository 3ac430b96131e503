"""The HTTP application and the server process."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, describe_error, error_body
from refusion_lit.serving.service import Service

API_KEY = "REFUSION_LIT_API_KEY"
"""Environment variable with the API key that clients must send."""
_GRACE_SECONDS = 5.0
"""Seconds that a running model call gets after the drain limit. Then the process exits without waiting for the call."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")
"""Host headers that are accepted when no API key is set."""
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
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
        await asyncio.to_thread(worker.thread.join, _GRACE_SECONDS)

    handlers: Any = dict.fromkeys((HTTPException, RequestValidationError, Exception), partial(_refuse, service))
    # FastAPI's documentation pages are off: they load scripts from a CDN.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, exception_handlers=handlers)
    app.add_middleware(_limit_bodies, max_bytes=worker.limits.max_body_bytes)
    if not key:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_HOSTS)

    async def check_key(credentials: _Credentials) -> None:
        if key and not (credentials and hmac.compare_digest(credentials.credentials.encode(), key.encode())):
            raise HTTPException(401, "authorization: expected the API key, got none or another; send it as a bearer.")

    @app.get("/health")
    async def health() -> Response:
        state = "stopping" if worker.is_draining else "ready" if worker.is_ready else "loading"
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    @app.get("/")
    async def show() -> Response:
        return FileResponse(Path(__file__).with_name("page.html"), headers={"Content-Security-Policy": _PAGE_POLICY})

    api = APIRouter(dependencies=[Depends(check_key)])

    @api.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @api.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": service.name, "object": "model", "created": 0, "owned_by": "refusion-lit"}
        return {"object": "list", "data": [card]}

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    app.include_router(api)
    return app


async def _refuse(service: Service, _: Request, error: Exception) -> Response:
    """Return an error response in OpenAI's form; details of unexpected errors go to the log only."""
    if isinstance(error, RequestValidationError):
        service.requests.labels("refused").inc()
        error = HTTPException(400, describe_error(error))
    elif not isinstance(error, HTTPException):
        error = HTTPException(500, f"the request failed ({type(error).__name__})")
    return JSONResponse(error_body(error), error.status_code, error.headers)


def _limit_bodies(app: ASGIApp, max_bytes: int) -> ASGIApp:
    """Return an application that refuses larger bodies, by the declared length or by the number of bytes read."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(raw=scope.get("headers", []))
        declared = int(headers.get("content-length", 0))
        num_read = 0

        async def receive_within_limit() -> Message:
            nonlocal num_read
            message = await receive() if declared <= max_bytes else {}
            num_read += len(message.get("body", b""))
            if max(declared, num_read) > max_bytes:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):  # closing a connection with unread data may lose the answer
                        while headers.get("connection") == "close" and (await receive()).get("more_body"):
                            pass
                raise HTTPException(413, f"body: expected at most {max_bytes} bytes, got more; shorten it.")
            return message

        await app(scope, receive_within_limit, send)

    return run


class Server(uvicorn.Server):
    """Runs the application. After SIGTERM or Ctrl-C, answers in flight may finish within a limit; others are refused.

    Args:
        app: The application.
        service: The application's service.
        host: Address to bind.
        port: Port to bind; 0: any free one.
    """

    def __init__(self, app: FastAPI, service: Service, host: str, port: int) -> None:
        super().__init__(uvicorn.Config(app, host=host, port=port, access_log=False, timeout_graceful_shutdown=5))
        self.worker = service.worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain at the first signal; stop at the second."""
        self.should_exit = self.worker.is_draining
        self.worker.drain(self.worker.limits.drain_seconds)

    async def on_tick(self, counter: int) -> bool:
        """Stop when the engine's thread has ended or hangs in a call of the model."""
        hangs = time.monotonic() > self.worker.stop_at + _GRACE_SECONDS
        self.should_exit = self.should_exit or hangs or not self.worker.thread.is_alive()
        return await super().on_tick(counter)
