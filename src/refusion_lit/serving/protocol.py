"""What clients may ask: OpenAI's fields that this server keeps, everything else refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_CHOICES = 16
MAX_STOPS = 16

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (False,), "echo": (False,),
    "best_of": (1,), "tools": ([],), "store": (False,), "parallel_tool_calls": (True, False), "min_p": (0,),
    "repetition_penalty": (1,),
}  # fmt: skip
"""Values of fields that ask for nothing, which some clients always send."""
_REASONS = {
    "logprobs": "a decoder that commits several tokens per forward has no log-probability of a next token",
    "top_logprobs": "a decoder that commits several tokens per forward has no log-probability of a next token",
    "tools": "this server calls no tools; use response_format for JSON",
    "logit_bias": "no decoder here has it",
}


class RequestError(ValueError):
    """A request that is answered by an error.

    Attributes:
        status: The HTTP status.
        param: The field at fault, if there is one.
        headers: Further headers of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the answer's body, in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


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


class JsonSchema(_Strict):
    """A schema, as OpenAI's clients wrap it."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema", default=True)
    strict: bool | None = None


class ResponseFormat(_Strict):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | bool | None:
        """The JSON schema that the answer keeps; ``None`` for text."""
        if self.type == "json_object":
            return {"type": "object"}
        if self.type == "json_schema":
            if self.json_schema is None:
                raise RequestError(400, "response_format: expected json_schema, got none; add it.", "response_format")
            return self.json_schema.schema_
        return None


class Asked(_Strict):
    """The fields that both endpoints have; what is ``None`` is up to the server's options."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    user: str | None = None  # who asks: nothing here depends on it

    @property
    def stops(self) -> tuple[str, ...] | None:
        """The stop strings; ``None`` if the field is missing."""
        if self.stop is None:
            return None
        found = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(found) > MAX_STOPS:
            raise RequestError(400, f"stop: expected at most {MAX_STOPS} strings, got {len(found)}; drop some.", "stop")
        return found


class TextPart(_Strict):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def turn(self) -> dict[str, str]:
        """Return the turn as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Asked):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Asked):
    """Body of ``/v1/completions``: a text to continue, without a chat template."""

    prompt: str | list[str]

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer."""
        return self.max_tokens

    @property
    def texts(self) -> list[str]:
        """The texts to continue."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


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
    asked = {name: value for name, value in values.items() if value is not None and not _is_neutral(name, value)}
    for name, reason in _REASONS.items():
        if name in asked:
            raise RequestError(400, f"{name}: refused, as {reason}; leave it out.", name)
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "body"
        if first["type"] == "extra_forbidden":
            known = ", ".join(field.alias or name for name, field in kind.model_fields.items())
            message = f"{name}: this server has no such field; leave it out. It has {known}."
        else:
            got = "" if first["type"] == "missing" else f", got {json.dumps(first['input'], default=str)[:60]}"
            message = f"{name}: {first['msg'][:1].lower()}{first['msg'][1:]}{got}."
        raise RequestError(400, message, name) from error


def _is_neutral(name: str, value: object) -> bool:
    return any(value == neutral for neutral in _NEUTRAL.get(name, ()))
