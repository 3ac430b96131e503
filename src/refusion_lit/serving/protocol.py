"""What clients may ask: OpenAI's fields that this server keeps, everything else refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (False,), "echo": (False,),
    "tools": ([],), "store": (False,), "response_format": ({"type": "text"},),
}  # fmt: skip
"""Values of fields that ask for nothing, which some clients always send."""
_REASONS = {
    "logprobs": "a decoder that commits several tokens per forward has no log-probability of a next token",
    "tools": "this server calls no tools",
    "response_format": "no decoder here guarantees JSON yet",
}


class RequestError(ValueError):
    """A request that is answered by an error.

    Attributes:
        status: The HTTP status.
        headers: Further headers of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the answer's body, in OpenAI's form; a message about a field begins with its name."""
        name = str(self).partition(":")[0]
        param = name if name.replace(".", "").isidentifier() else None
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.status}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """What a stream has besides text.

    Attributes:
        include_usage: A last chunk with the token counts.
        include_decode: Chunks tell every forward: drafted, verified and committed tokens by place (our own).
    """

    include_usage: bool = False
    include_decode: bool = False


class Asked(_Strict):
    """The fields that both endpoints have; what is ``None`` is up to the server's options."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = Field(default=None, max_length=16)
    n: int = Field(default=1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None  # who asks: nothing here depends on it


class Message(_Strict):
    """A turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(Asked):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


class CompletionRequest(Asked):
    """Body of ``/v1/completions``: texts to continue, without a chat template."""

    prompt: str | list[str] = Field(min_length=1, max_length=1_000_000)


def parse(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> ChatRequest | CompletionRequest:
    """Read a request's body.

    Raises:
        RequestError: Naming the field that is missing, unknown or wrong.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "body: expected JSON in UTF-8; send the fields as JSON.") from error
    if not isinstance(values, dict):
        raise RequestError(400, "body: expected a JSON object; send the fields by name.")
    asked = {name: each for name, each in values.items() if each is not None and each not in _NEUTRAL.get(name, ())}
    for name, reason in _REASONS.items():
        if name in asked:
            raise RequestError(400, f"{name}: refused, as {reason}; leave it out.")
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"{name}: this server has no such field; leave it out. It has {', '.join(kind.model_fields)}."
        else:
            got = "" if first["type"] == "missing" else f", got {json.dumps(first['input'], default=str)[:60]}"
            message = f"{name}: {first['msg'][:1].lower()}{first['msg'][1:]}{got}."
        raise RequestError(400, message) from error
