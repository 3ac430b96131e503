"""Bodies of requests and errors: the supported fields of OpenAI's API. Other fields are refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from starlette.exceptions import HTTPException

from refusion_lit.utils.require import require

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "logit_bias": ({},), "min_p": (0,), "min_tokens": (0,), "modalities": (["text"],), "verbosity": ("medium",),
    "annotations": ([],), "functions": ([],), "function_call": ("none", "auto"),
}  # fmt: skip
_SWITCHES = (
    "echo", "background", "ignore_eos", "use_beam_search", "include_stop_str_in_output", "continue_final_message",
)  # fmt: skip
"""Fields that clients always send. ``_NEUTRAL`` fields have no effect with these values, ``_SWITCHES`` if false."""
_ALL_TOKENS = 2**31 - 1
"""More tokens than any vocabulary has."""

_TopK = Annotated[
    int | None,
    Field(ge=1),
    BeforeValidator(lambda value: _ALL_TOKENS if type(value) is int and value in (0, -1) else value),
]
"""Number of most probable tokens to keep; 0 and -1 keep all tokens, as in vLLM and SGLang."""
_Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""A list of texts, or a text."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def drop_fields_without_effect(cls, values: Any) -> Any:  # noqa: ANN401 - any JSON
        """Drop ``None``, unsupported fields with neutral values, and a limit given twice."""
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if value is not None
            and (isinstance(value, bool) or value not in _NEUTRAL.get(name, ()))
            and (value is not False or name not in _SWITCHES)
            and (name != "max_completion_tokens" or value != values.get("max_tokens"))
        }


class StreamOptions(_Strict):
    """Contents of a stream in addition to text.

    Attributes:
        include_usage: A last chunk has the token counts.
        include_obfuscation: Has no effect; OpenAI's servers hide the lengths of chunks with it.
        include_decode: Chunks describe every forward pass: drafted, verified and committed tokens by place. This field
            is not in OpenAI's API.
    """

    include_usage: bool = False
    include_obfuscation: bool | None = None
    include_decode: bool = False


class JsonSchema(_Strict):
    """A JSON schema in the form of OpenAI's clients; only ``schema`` has an effect."""

    schema_: Any = Field(alias="schema", default=True)  # checked by Schemas
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The answer's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_schema(self) -> Any:  # noqa: ANN401 - a JSON schema is an object or a boolean
        """Return the answer's JSON schema; ``None`` for text.

        Raises:
            ValueError: If the type is json_schema and the schema is missing, or the other way round.
        """
        schema = self.json_schema and self.json_schema.schema_
        fits = (self.json_schema is not None) == (self.type == "json_schema")
        expected = "a schema if the type is json_schema, and none otherwise"
        require(fits, "response_format.json_schema", expected, schema, "change the type or the schema")
        return {"type": "object"} if self.type == "json_object" else schema


class _Labels(_Strict):
    """Fields without effect: names of users, caches and requests, and preferences that a server may ignore."""

    user: str | None = None
    metadata: dict[str, str] = {}
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How long a model is to think; ``none``: not at all."""


class _AnyRequest(_Labels):
    """Fields that all endpoints share; for ``None``, the server's options apply."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: _TopK = None
    seed: int | None = None
    stream: bool = False


class BaseRequest(_AnyRequest):
    """Fields that chats and completions share."""

    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    stop: _Texts | None = Field(None, max_length=16)
    n: int = Field(default=1, ge=1, le=16)
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat(type="text")


class _Part(_Strict):
    """A part of a message's content. Marks of a prefix to cache have no effect."""

    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class TextPart(_Part):
    """A part of a message's content, which must be text."""

    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    """A function that an assistant's turn calls, with its arguments as JSON text."""

    name: str
    arguments: str

    def parse_arguments(self) -> Any:  # noqa: ANN401 - any JSON
        """Return the arguments as values, because templates format them; return text that is not JSON unchanged."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


class ToolCall(_Strict):
    """A tool call in an assistant's turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    """A turn of a chat.

    Attributes:
        role: Whose turn it is.
        content: The turn's text. It may be missing if an assistant's turn calls tools.
        name: The speaker's or tool's name.
        tool_calls: The tools that an assistant's turn calls.
        tool_call_id: Id of the call whose result a tool's turn has.
        reasoning_content: An assistant's thoughts, for templates that write them; also called ``reasoning``.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart] | None,
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))

    @model_validator(mode="after")
    def check_content(self) -> Message:
        """Refuse a turn without text, unless it calls tools."""
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise ValueError(f"a turn of the {self.role} needs content")
        return self

    @property
    def text(self) -> str:
        """The turn's text."""
        return "".join(part.text for part in self.content or ())

    def to_turn(self) -> dict[str, Any]:
        """Return the turn as chat templates read it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            calls = [(call, {"name": call.function.name, "arguments": call.function.parse_arguments()})
                     for call in self.tool_calls]  # fmt: skip
            turn["tool_calls"] = [{"id": call.id, "type": call.type, "function": function} for call, function in calls]
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return turn | {name: value for name, value in others.items() if value is not None}


class Function(_Strict):
    """A function that a response may call. ``strict`` has no effect: forced calls always keep the schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check_parameters(self) -> Function:
        """Refuse parameters that are no object."""
        if self.parameters and self.parameters.get("type", "object") != "object":
            raise ValueError("parameters must have the type object")
        return self

    def to_schema(self) -> dict[str, Any]:
        """Return the arguments' JSON schema; without ``additionalProperties``, there are no further arguments."""
        schema: dict[str, Any] = {"type": "object", "properties": {}, **(self.parameters or {})}
        return schema if schema.keys() & _APPLICATORS else {"additionalProperties": False, **schema}


_APPLICATORS = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties"}
"""Keywords that add properties; ``additionalProperties: false`` beside them could forbid these properties."""


class _Ordered(_Strict):
    """A tool's description. Its fields keep the client's order, because chat templates write them in this order."""

    _fields: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def keep_order(cls, values: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:  # noqa: ANN401 - any JSON
        """Keep the fields as the client sent them."""
        tool = handler(values)
        tool._fields = values
        return tool


class Tool(_Ordered):
    """A tool that a response may call; tools are functions."""

    type: Literal["function"]
    function: Function

    def to_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = self._fields["function"]
        fields = {name: value for name, value in function.items() if name != "strict" and value is not None}
        return self._fields | {"function": fields}


class FunctionName(_Strict):
    """A function's name."""

    name: str


class ToolChoice(_Strict):
    """Whether a response calls tools: as the model likes, never, always, or a certain function."""

    type: Literal["auto", "none", "required", "function"]
    function: FunctionName | None = None

    @model_validator(mode="after")
    def check_function(self) -> ToolChoice:
        """Refuse a function choice without name, and a name with another choice."""
        if (self.type == "function") != (self.function is not None):
            raise ValueError("a name belongs to the type function, and to no other type")
        return self


_Choice = Annotated[ToolChoice, BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)]


class ChatRequest(BaseRequest):
    """Body of ``/v1/chat/completions``."""

    is_chat: ClassVar[bool] = True
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = Field(default=[], max_length=128)
    tool_choice: _Choice = ToolChoice(type="auto")
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def functions(self) -> dict[str, Function]:
        """Functions that the response may call, by name.

        Raises:
            ValueError: If two functions have the same name, the tool choice names no function, or the response must be
                JSON, too.
        """
        functions = {tool.function.name: tool.function for tool in self.tools}
        names = [tool.function.name for tool in self.tools]
        require(len(functions) == len(names), "tools", "functions of different names", names, "rename some")
        chosen = self.tool_choice.function
        name = "tool_choice.function.name"
        is_known = chosen is None or chosen.name in functions
        require(is_known, name, f"one of {', '.join(names) or 'no tools'}", chosen and chosen.name, "name one of them")
        has_tools = bool(names) or self.tool_choice.type != "required"
        require(has_tools, "tool_choice", "auto or none without tools", "required", "give tools")
        if self.tool_choice.type == "none":
            return {}
        is_text = self.response_format.type == "text" or not functions
        fix = "set tool_choice to none"
        require(is_text, "response_format", "text while tools may be called", self.response_format.type, fix)
        return functions if chosen is None else {chosen.name: functions[chosen.name]}

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives per token get a log-probability; ``None``: no log-probabilities at all.

        Raises:
            ValueError: If alternatives are requested without log-probabilities.
        """
        is_allowed = self.logprobs or self.top_logprobs is None
        require(is_allowed, "top_logprobs", "none without logprobs", self.top_logprobs, "set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(BaseRequest):
    """Body of ``/v1/completions``: texts to continue, without a chat template."""

    is_chat: ClassVar[bool] = False
    prompt: _Texts
    best_of: int | None = None
    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        default=None, ge=0, le=20
    )

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives per token get a log-probability; ``None``: no log-probabilities at all."""
        return self.logprobs


class ResponseText(_Part):
    """A part of an item's content in ``/v1/responses``, which must be text."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


def _to_parts(value: Any) -> Any:  # noqa: ANN401 - any JSON
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Parts = Annotated[list[ResponseText], BeforeValidator(_to_parts)]


class InputItem(_Strict):
    """A turn, its thoughts, a function call, or a call's result.

    ``id``, ``status``, ``phase`` and ``summary`` have no effect.
    """

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Parts | None = None
    summary: list[Any] = []

    @model_validator(mode="after")
    def check_fields(self) -> InputItem:
        """Refuse an item without its type's fields."""
        fields = {
            "message": ("role", "content"),
            "reasoning": (),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        for name in fields[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} needs {name}")
        return self


class ResponseTool(Function, _Ordered):
    """A function that a response may call, as ``/v1/responses`` describes it."""

    type: Literal["function"]

    def to_tool(self) -> dict[str, Any]:
        """Return the tool as chats describe it."""
        return {"type": self.type, "function": {name: value for name, value in self._fields.items() if name != "type"}}


class ResponseToolChoice(_Strict):
    """Whether a response calls tools, as ``/v1/responses`` describes it."""

    type: Literal["auto", "none", "required", "function"]
    name: str | None = None


class TextFormat(JsonSchema):
    """The text's format in ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(_Strict):
    """Text options in ``/v1/responses``."""

    format: TextFormat = TextFormat()


class Reasoning(_Strict):
    """Thinking options in ``/v1/responses``. Thoughts are not summarized; they are in the text."""

    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    context: Literal["auto"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(_Strict):
    """Stream options in ``/v1/responses``, without effect."""

    include_obfuscation: bool | None = None


_LOGPROBS = "message.output_text.logprobs"
_Include = Literal[
    "message.output_text.logprobs", "message.input_image.image_url", "reasoning.encrypted_content",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]  # fmt: skip
"""Additional contents of a response. Only the first has an effect; responses here have no items of the other kinds."""


class ResponsesRequest(_AnyRequest):
    """Body of ``/v1/responses``. Responses are not stored, so the input is the whole conversation."""

    input: Annotated[
        list[InputItem],
        BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value),
    ] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[ResponseTool] = Field(default=[], max_length=128)
    tool_choice: Annotated[
        ResponseToolChoice, BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)
    ] = ResponseToolChoice(type="auto")
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    stream_options: ResponseStreamOptions | None = None
    include: list[_Include] = []
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"  # no effect: an input that is too long is refused
    max_tool_calls: int | None = None  # limits tools that a server runs; this server runs none

    def to_chat(self) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            HTTPException: If a value is wrong.
            ValueError: If alternatives are requested without log-probabilities.
        """
        has_logprobs = _LOGPROBS in self.include
        is_allowed = has_logprobs or not self.top_logprobs
        require(is_allowed, "top_logprobs", "0 without log-probabilities", self.top_logprobs, f"include {_LOGPROBS}")
        shared = self.model_dump(include={*_AnyRequest.model_fields, "chat_template_kwargs", "parallel_tool_calls"})
        choice: dict[str, Any] = {"type": self.tool_choice.type}
        if self.tool_choice.name is not None:
            choice["function"] = {"name": self.tool_choice.name}
        form: dict[str, Any] = {"type": self.text.format.type}
        if "schema_" in self.text.format.model_fields_set:
            form["json_schema"] = {"schema": self.text.format.schema_}
        try:
            return ChatRequest.model_validate(
                {
                    **shared,
                    "max_tokens": self.max_output_tokens,
                    "tools": [tool.to_tool() for tool in self.tools],
                    "tool_choice": choice,
                    "response_format": form,
                    "messages": self._turns(),
                    "reasoning_effort": self.reasoning.effort,
                    "logprobs": has_logprobs,
                    "top_logprobs": self.top_logprobs if has_logprobs else None,
                }
            )
        except ValidationError as error:
            raise HTTPException(400, describe_error(error)) from error

    def _turns(self) -> list[dict[str, Any]]:
        """Return the conversation as a chat; the assistant's thoughts, text and calls in this order are one turn."""
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.type == "reasoning":
                thoughts = _join_parts(item.content)  # without content, the item has at most a summary
                turns += [{"role": "assistant", "content": None, "reasoning_content": thoughts}] if thoughts else []
            elif item.type == "message":
                turn = {"role": item.role, "content": _join_parts(item.content)}
                if turns and item.role == "assistant" and turns[-1].keys() == {"role", "content", "reasoning_content"}:
                    turn = turns.pop() | turn
                turns.append(turn)
            elif item.type == "function_call_output":
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _join_parts(item.output)})
            else:
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                turns[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        return turns


def _join_parts(parts: Sequence[ResponseText] | None) -> str:
    return "".join(part.text for part in parts or ())


_Body = TypeVar("_Body", bound=BaseModel)


def read_body(kind: type[_Body], content: bytes, content_type: str) -> _Body:
    """Read a request's body.

    Args:
        kind: The body's class.
        content: The body's bytes.
        content_type: The declared type. It must be JSON, which pages of other sites cannot send.

    Raises:
        HTTPException: If the body is not JSON, or a field is missing, unknown or wrong.
    """
    main_type, _, sub_type = content_type.partition(";")[0].strip().lower().partition("/")
    expected, got = "", "something else"
    try:
        if main_type != "application" or sub_type.rpartition("+")[2] != "json":
            expected, got = "JSON with Content-Type: application/json", "another type"
        else:
            return kind.model_validate(json.loads(content))
    except ValidationError as error:
        raise HTTPException(400, describe_error(error)) from error
    except UnicodeDecodeError:
        expected = "JSON in UTF-8"
    except json.JSONDecodeError as error:
        expected, got = "JSON", str(error)
    except RecursionError:
        expected, got = "JSON of fewer levels", "too many"
    except ValueError:
        expected, got = "integers of at most 4300 digits", "more"
    raise HTTPException(400, f"body: expected {expected}, got {got}; correct it.")


def describe_error(error: ValidationError) -> str:
    """Return a message about the first missing, unknown or wrong field. It begins with the field's name."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"])) or "body"
    if first["type"] == "extra_forbidden":
        is_limit = name == "max_completion_tokens"
        reason = "max_tokens has another value" if is_limit else "this server has no such field"
        return f"{name}: refused, as {reason}; leave it out."
    has_input = first["type"] != "missing"
    got = f", got {json.dumps(first['input'], default=str)[:60]}" if has_input else ""
    return f"{name}: {first['msg']}{got}."


def error_body(error: HTTPException) -> dict[str, Any]:
    """Return an error in OpenAI's form; a message about a field begins with the field's name."""
    message = error.detail.encode(errors="backslashreplace").decode()  # lone surrogates cannot be sent
    name = message.partition(":")[0]
    param = name if name.replace(".", "").isidentifier() else None
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": error.status_code}}
