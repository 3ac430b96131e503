"""The door of the server: who may come in, and how large a body may be."""

from __future__ import annotations

import hmac
import json
from typing import TYPE_CHECKING

from refusion_lit.serving.protocol import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

API_KEY = "REFUSION_LIT_API_KEY"
"""Environment variable with the key that clients must send."""
LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")
_OPEN = ("/", "/health")
"""Paths that need no key: the page, which asks for it, and what a load balancer reads."""


class Guard:
    """ASGI middleware that refuses requests before anything of their body is read.

    Without a key, only requests addressed to this machine by a local name are served, so that no page of another site
    can reach the server through a name that it made point here. Bodies must be declared as JSON, which a page of
    another site cannot do without asking first.

    Args:
        app: The application.
        key: The API key; ``None``: none is needed.
        max_body: Maximum size of a body, in bytes.
    """

    def __init__(self, app: ASGIApp, key: str | None, max_body: int) -> None:
        self.app = app
        self.key = key
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise self._too_large()
            return message

        try:
            self._check(scope)
            await self.app(scope, counted, send)
        except RequestError as error:
            body = json.dumps(error.body()).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.key is None:
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in LOCAL:
                raise RequestError(403, f"host: expected one of {', '.join(LOCAL)}; set {API_KEY} to serve others.")
        elif scope["path"] not in _OPEN:
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(given, self.key.encode()):
                raise RequestError(401, "authorization: expected the API key as a bearer token.")
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise RequestError(415, "content-type: expected application/json.")
            if (
                int(headers.get("content-length", "0") if headers.get("content-length", "0").isdigit() else 0)
                > self.max_body
            ):
                raise self._too_large()

    def _too_large(self) -> RequestError:
        return RequestError(413, f"body: expected at most {self.max_body} bytes; send less.")
