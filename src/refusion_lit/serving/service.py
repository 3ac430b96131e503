"""Turns API requests into the worker's jobs, and the jobs' results into answers or streams."""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from refusion_lit.constraints.schemas import Schemas
from refusion_lit.constraints.tool_calls import (
    CallPiece,
    CallReader,
    Piece,
    ThoughtPiece,
    ToolFormat,
    find_tool_format,
)
from refusion_lit.data.encoding import encode_plain_prompt
from refusion_lit.engine.checks import check_context, check_prompts
from refusion_lit.engine.stopping import TextStream
from refusion_lit.modeling.chat_template import effort_options, find_thought_tags
from refusion_lit.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    Function,
    ResponsesRequest,
    error_body,
    read_body,
)
from refusion_lit.serving.responses import (
    LogprobEntries,
    ResponseBuilder,
    chat_logprobs,
    completion_logprobs,
    new_call_id,
)
from refusion_lit.serving.worker import Job, Update, Worker, log
from refusion_lit.text_model import TextModel
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.require import OptionError, require

_API_NAMES = {"max_new_tokens": "max_tokens", "json_schema": "response_format"}
"""The API's option names, by the engine's names."""
_Result = TypeVar("_Result")
_Body = TypeVar("_Body", bound=ChatRequest | CompletionRequest | ResponsesRequest)
_RESPONSES_NAMES = {
    "max_new_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "json_schema": "text.format",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "messages": "input",
    "prompt": "input",
    "tool_choice.function.name": "tool_choice.name",
}
"""Option names in ``/v1/responses``, by their names in chats and in the engine."""


@dataclass(frozen=True)
class ToolCalls:
    """Which tools a response may call.

    Attributes:
        functions: The functions by name.
        tool_format: How the model writes calls.
        are_forced: Whether the response consists of calls.
        are_parallel: Whether a forced response may have several calls.
    """

    functions: dict[str, Function]
    tool_format: ToolFormat
    are_forced: bool
    are_parallel: bool


@dataclass(frozen=True)
class PreparedRequest:
    """A request that has been read and encoded.

    Attributes:
        body: The request as a chat or completion.
        sampling: The request's length limit and sampling options.
        calls: The tools that the response may call.
        prompts: The request's prompts.
    """

    body: ChatRequest | CompletionRequest
    sampling: SamplingParams
    calls: ToolCalls | None
    prompts: list[Prompt]


@dataclass
class ServedRequest:
    """A request in flight.

    Attributes:
        body: The request's body.
        id: The request's id in the answer and in the log.
        started: Arrival time (:func:`time.monotonic`).
        jobs: A job per choice.
        events: Updates to the jobs, from the worker.
    """

    body: ChatRequest | CompletionRequest
    id: str
    started: float
    jobs: list[Job] = field(default_factory=list)
    events: asyncio.Queue[tuple[Job, Update | HTTPException]] = field(default_factory=asyncio.Queue)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's form, number of forward passes and tokens per forward pass."""
        results = [job.result for job in self.jobs if job.result]
        num_prompt_tokens = sum(len(job.prompt.token_ids) for job in self.jobs) // self.body.n
        num_tokens = sum(row.num_tokens for row in results)
        num_forwards = sum(row.num_forwards for row in results)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "forwards": num_forwards,
            "tokens_per_forward": round(num_tokens / num_forwards, 3) if num_forwards else None,
        }

    @property
    def answer_usage(self) -> dict[str, Any]:
        """The usage, including the number of tokens in thoughts that are returned beside the text."""
        num_tokens = sum(map(_count_thought_tokens, self.jobs))
        return self.usage | ({"completion_tokens_details": {"reasoning_tokens": num_tokens}} if num_tokens else {})

    def make_answer(self, *choices: dict[str, Any], **more: object) -> dict[str, Any]:
        """Return the body for an answer, or for a chunk in a stream."""
        kind = f"chat.completion{'.chunk' * self.body.stream}" if self.body.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.body.model}
        return head | {"seed": self.jobs[0].sampling.seed, "choices": choices, **more}

    def make_choice(
        self, job: Job, pieces: Sequence[Piece], entries: LogprobEntries, model: TextModel
    ) -> dict[str, Any]:
        """Return a choice, or the part of a choice in a chunk. The first part has the role.

        Args:
            job: The choice's job.
            pieces: The choice's text, thoughts and tool calls.
            entries: Tokens with their log-probabilities.
            model: Gives the tokens' text.
        """
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        thoughts = "".join(piece.text for piece in pieces if isinstance(piece, ThoughtPiece))
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, CallPiece):
                call = calls.setdefault(piece.index, {"function": {"arguments": ""}})
                if piece.name is not None:  # the call's first piece
                    call |= {"id": new_call_id(), "type": "function"}
                    call["function"]["name"] = piece.name
                call["function"]["arguments"] += piece.arguments
        has_calls = job.reader is not None and job.reader.num_calls > 0
        reason = job.result and ("stop" if job.result.finish_reason in ("eos", "stop") else "length")
        reason = "tool_calls" if has_calls and reason == "stop" else reason
        message: dict[str, Any] = {} if job.has_begun else {"role": "assistant"}
        job.has_begun = True
        is_between = self.body.stream and job.reader is not None  # the chunk's text is a part of a call's frame
        message["content"] = None if (calls or thoughts or is_between) and not text else text
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            numbered = [{"index": index, **call} for index, call in calls.items()]
            message["tool_calls"] = numbered if self.body.stream else [*calls.values()]
        content = {"delta" if self.body.stream else "message": message} if self.body.is_chat else {"text": text}
        logprobs = None
        if job.num_top_logprobs is not None:
            if self.body.is_chat:
                logprobs = chat_logprobs(entries, model)
            else:
                logprobs = completion_logprobs(entries, model, job.num_characters)
            job.num_characters += sum(len(model.token_text(token)) for token, _ in entries)
        return {"index": self.jobs.index(job), **content, "logprobs": logprobs, "finish_reason": reason}


def _count_thought_tokens(job: Job) -> int:
    """Return the number of tokens in a complete response's thoughts, tags included."""
    if job.reader is None or job.result is None:
        return 0
    tokens = job.result.token_ids

    def count_tokens(num_characters: int) -> int:  # in the first characters of the text
        return bisect_left(range(len(tokens)), num_characters, key=lambda num: len(job.detokenize(tokens[:num])))

    return sum(count_tokens(end) - count_tokens(start) for start, end in job.reader.thought_spans)


class Service:
    """Answers requests.

    Args:
        worker: Runs the jobs.
        name: The model's name.
        tool_format: How the model writes calls of tools: a key of
            :data:`~refusion_lit.constraints.tool_calls.FORMATS`, or ``auto`` for the chat template's format.
        separate_reasoning: Whether chats and responses return thoughts beside the text instead of in it.

    Attributes:
        registry: Prometheus metrics: requests, tokens, forward passes and times.
    """

    def __init__(
        self, worker: Worker, name: str, tool_format: str = "auto", *, separate_reasoning: bool = False
    ) -> None:
        self.worker = worker
        self.name = name
        tokenizer = worker.model.tokenizer
        self.tool_format = find_tool_format(tokenizer.chat_template, tool_format)
        self.separate_reasoning = separate_reasoning
        self.thought_tags = find_thought_tags(tokenizer.chat_template)
        special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
        self._hides_tags = bool({*self.thought_tags} & special)
        # Tokenizers are not thread-safe. The worker's thread, the event loop, the encoding of prompts and the
        # compilation of schemas get separate copies.
        self.model, self._encoder = copy.copy(worker.model), copy.copy(worker.model)
        self.model.tokenizer = copy.deepcopy(worker.model.tokenizer)
        self._encoder.tokenizer = copy.deepcopy(worker.model.tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # in characters, or in bytes
        self._preparing, self._compiling = asyncio.Lock(), asyncio.Lock()
        self._num_preparing = 0  # requests in preparation or waiting for it
        self.schemas = Schemas(copy.deepcopy(worker.model.tokenizer), worker.model.backbone.special_tokens)
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry, "namespace": "refusion_lit"}
        self.requests = Counter(
            "requests", "Requests: done, failed, gone (client left), refused", ["outcome"], **options
        )
        self._counts = Counter("counts", "Tokens and forwards, named as in an answer's usage", ["kind"], **options)
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
        times = "Time to the first text, and to the end"
        self._seconds = Histogram("seconds", times, ["until"], buckets=buckets, **options)
        Gauge("rows_in_flight", "Answers in flight", **options).set_function(lambda: len(worker.active))
        Gauge("waiting", "Answers that wait for a row", **options).set_function(lambda: len(worker.waiting))

    async def answer(self, kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
        """Answer a request.

        Args:
            kind: The class of the request's body.
            request: The request.

        Raises:
            HTTPException: If the request is refused, or fails.
        """
        _, served = await self._accept(kind, request, _API_NAMES)
        if served.body.stream:
            return StreamingResponse(self._stream(served), media_type="text/event-stream")
        return await self._wait(self._collect(served), request)

    async def respond(self, request: Request) -> Response:
        """Answer a request of ``/v1/responses``.

        Raises:
            HTTPException: If the request is refused, or fails.
        """
        body, served = await self._accept(ResponsesRequest, request, _RESPONSES_NAMES)
        response_id = served.id.replace("chatcmpl-", "resp_")
        builder = ResponseBuilder(body, response_id, served.jobs[0].sampling, self.model)
        if body.stream:
            return StreamingResponse(self._stream_response(served, builder), media_type="text/event-stream")
        return await self._wait(self._collect_response(served, builder), request)

    async def _accept(
        self, kind: type[_Body], request: Request, names: Mapping[str, str]
    ) -> tuple[_Body, ServedRequest]:
        """Read a request's body and begin the request.

        Args:
            kind: The body's class.
            request: The request.
            names: The API's option names, by the engine's names.

        Raises:
            HTTPException: If the request is refused.
        """
        try:
            content = await request.body()
            prepare = partial(self._prepare, kind, content, request.headers.get("content-type", ""))
            body, prepared = await self._run_in_turn(self._preparing, prepare, request.state.arrived)
            served = await self._begin(prepared, request.state.arrived)
        except ClientDisconnect:
            self.requests.labels("gone").inc()
            raise HTTPException(400, "body: expected all of it, got a part; send it again.") from None
        except (ValueError, RecursionError, HTTPException) as error:
            self.requests.labels("refused").inc()
            if isinstance(error, HTTPException):
                raise
            if isinstance(error, RecursionError):
                raise HTTPException(400, "body: expected JSON of fewer levels, got too many; simplify it.") from None
            name = names.get(error.option) if isinstance(error, OptionError) else None
            message = error.rename(name) if isinstance(error, OptionError) and name else str(error)
            raise HTTPException(400, message) from error
        request.state.is_stream = served.body.stream
        return body, served

    async def _wait(self, answer: Coroutine[Any, Any, dict[str, Any]], request: Request) -> Response:
        """Return the HTTP response of an answer, unless the client leaves first."""
        collecting = asyncio.create_task(answer)
        while not (await asyncio.wait({collecting}, timeout=0.5))[0]:  # seconds
            if await request.is_disconnected():
                collecting.cancel()
                return Response(status_code=499)
        # In ASCII, because a lone surrogate in a field that the response repeats cannot be sent as it is.
        return Response(json.dumps(collecting.result()), media_type="application/json")

    def check_name(self, name: str) -> None:
        """Refuse another model's name.

        Raises:
            HTTPException: If the name is not the model's.
        """
        if name != self.name:
            raise HTTPException(404, f"model: expected {self.name!r}, got {name[:60]!r}; see /v1/models.")

    async def _run_in_turn(self, lock: asyncio.Lock, work: Callable[[], _Result], arrived: float) -> _Result:
        """Run a request's work in a thread, one request at a time; it takes seconds and must not block other requests.

        Raises:
            HTTPException: If too many requests wait for their turn (429), or the request's time is over (504).
        """
        if self._num_preparing >= self.worker.max_jobs:
            raise HTTPException(429, "the queue is full; try again later.", headers={"Retry-After": "1"})
        too_late = HTTPException(504, "the time limit of a request is over")
        ends = arrived + self.worker.limits.max_seconds
        self._num_preparing += 1

        async def wait_and_work() -> _Result:
            try:
                async with lock:
                    if time.monotonic() > ends:
                        raise too_late
                    return await asyncio.to_thread(work)
            finally:
                self._num_preparing -= 1

        try:
            async with asyncio.timeout(ends - time.monotonic()):
                return await asyncio.shield(wait_and_work())  # a thread cannot be ended, so it keeps its turn
        except TimeoutError:
            raise too_late from None

    def _prepare(self, kind: type[_Body], content: bytes, content_type: str) -> tuple[_Body, PreparedRequest]:
        """Read and check a request's body, and encode its prompts.

        Raises:
            HTTPException: If the body is wrong, the request names another model, or the server is loading.
            ValueError: If an option is impossible.
        """
        body = read_body(kind, content, content_type)
        chat = body.to_chat() if isinstance(body, ResponsesRequest) else body
        self.check_name(chat.model)
        if not self.worker.is_ready:
            raise HTTPException(503, "the model is loading.", headers={"Retry-After": "2"})
        sampling = self._build_sampling(chat)
        calls = self._plan_calls(chat)
        prompts = [Prompt(token_ids=tuple(ids), id="0") for ids in self._encode(chat)]
        return body, PreparedRequest(chat, sampling, calls, prompts)

    async def _begin(self, prepared: PreparedRequest, arrived: float) -> ServedRequest:
        """Constrain a request's prompts and submit its jobs. The request's time limit includes this work.

        Args:
            prepared: The request.
            arrived: Time (:func:`time.monotonic`) at which the request's head arrived.

        Raises:
            HTTPException: If the server is stopping or busy.
            ValueError: If an option is impossible.
        """
        worker, body, sampling, calls = self.worker, prepared.body, prepared.sampling, prepared.calls
        served = ServedRequest(body, f"{'chat' * body.is_chat}cmpl-{secrets.token_hex(12)}", arrived)
        constrain = partial(self._constrain, prepared.prompts, body, calls, sampling)
        is_free = body.response_format.type == "text" and not (calls is not None and calls.are_forced)
        prompts = constrain() if is_free else await self._run_in_turn(self._compiling, constrain, arrived)
        longest = max(len(prompt.token_ids) + prompt.num_uncounted for prompt in prompts)
        most = worker.limits.max_prompt_tokens
        require(longest <= most, "prompt", f"at most {most} tokens, including a schema's", longest, "shorten it")
        check_context(worker.checked_model, [(longest, "")], sampling.max_new_tokens, worker.decoder, "max_tokens")
        check_prompts(worker.checked_model, worker.decoder, prompts, sampling)
        notify = partial(asyncio.get_running_loop().call_soon_threadsafe, served.events.put_nowait)
        # Names of special tokens that begin calls or enclose thoughts are kept as text.
        separates = self.separate_reasoning and body.is_chat and body.response_format.type == "text"
        has_reader = calls is not None or separates
        kept: tuple[str, ...] = self.thought_tags if has_reader else ()
        if calls is not None:
            kept = (*kept, calls.tool_format.begin + calls.tool_format.after_name)
        detokenize = partial(worker.model.detokenize, stop=sampling.stop, keep=kept)
        served.jobs = [
            Job(prompt=replace(prompt, id=str(number)), sampling=sampling, notify=notify,
                deadline=served.started + worker.limits.max_seconds,
                wants_rounds=body.stream_options.include_decode, num_top_logprobs=body.num_top_logprobs,
                reader=self._make_reader(prompt, calls) if has_reader else None,
                detokenize=partial(detokenize, after=prompt.token_ids),
                stream=TextStream(partial(detokenize, after=prompt.token_ids, is_growing=True), sampling))
            for prompt in prompts
            for number in range(body.n)  # keys the noise of a choice
        ]  # fmt: skip
        worker.submit(served.jobs)
        log.debug("%s asked: %r", served.id, body)
        return served

    def _make_reader(self, prompt: Prompt, calls: ToolCalls | None) -> CallReader:
        """Return a reader for a response that may have thoughts and calls."""
        opened = str(self.model.tokenizer.decode([*prompt.token_ids[-32:]], skip_special_tokens=False))
        return CallReader(
            calls and calls.tool_format,
            calls.functions if calls else (),
            is_constrained=calls is not None and calls.are_forced,
            thought_tags=self.thought_tags,
            is_thinking=prompt.constraint is None and opened.rstrip().endswith(self.thought_tags[0]),
            thoughts="separate" if self.separate_reasoning else "untagged" if self._hides_tags else "text",
        )

    def _plan_calls(self, body: ChatRequest | CompletionRequest) -> ToolCalls | None:
        """Return which tools a response may call; ``None``: no tools.

        Raises:
            ValueError: If the choice is wrong, or the model's chat template renders no tools.
        """
        if not isinstance(body, ChatRequest) or not body.functions:
            return None
        expected = "none, as the model's chat template has no known format of calls"
        fix = "set --tool_format if the template renders tools, or use response_format"
        require(self.tool_format is not None, "tools", expected, [*body.functions], fix)
        assert self.tool_format is not None
        kind = body.tool_choice.type
        return ToolCalls(
            functions=body.functions,
            tool_format=self.tool_format,
            are_forced=kind in ("required", "function"),
            are_parallel=kind == "required" and body.parallel_tool_calls,
        )

    def _constrain(
        self,
        prompts: list[Prompt],
        body: ChatRequest | CompletionRequest,
        calls: ToolCalls | None,
        sampling: SamplingParams,
    ) -> list[Prompt]:
        """Constrain a request's prompts: responses follow the request's schema, or are calls of its tools.

        Raises:
            ValueError: If a schema cannot be kept.
        """
        options: dict[str, Any] = {"decoder": self.worker.decoder, "sampling": sampling}
        schema = body.response_format.to_schema()
        if schema is not None:
            return self.schemas.constrain(prompts, schema, **options)
        if calls is None or not calls.are_forced:
            return prompts
        schemas = {name: function.to_schema() for name, function in calls.functions.items()}
        options["is_parallel"] = calls.are_parallel
        try:
            return self.schemas.constrain_calls(prompts, schemas, calls.tool_format, **options)
        except OptionError as error:
            name = "tools" if error.option == "json_schema" else error.option
            raise OptionError(error.rename(name), name) from error

    def _build_sampling(self, body: ChatRequest | CompletionRequest) -> SamplingParams:
        """Return a request's sampling options; missing options are the server's."""
        default = self.worker.sampling
        most = self.worker.limits.max_answer_tokens
        limit = min(default.max_new_tokens, most) if body.max_tokens is None else body.max_tokens
        require(limit <= most, "max_tokens", f"at most {most}", limit, "lower it")
        options = body.model_dump(include={"temperature", "top_p", "top_k", "stop", "seed"}, exclude_none=True)
        sampling = replace(default, max_new_tokens=limit, **options)
        if body.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=secrets.randbits(31))  # the answer contains the seed
        self.worker.decoder.check(sampling)
        return sampling

    def _encode(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Return the prompts' tokens; special tokens' names in texts stay text."""
        model, most = self._encoder, self.worker.limits.max_prompt_tokens
        texts = [message.text for message in body.messages] if isinstance(body, ChatRequest) else body.prompt
        longest = sum(map(len, texts)) if body.is_chat else max(map(len, texts), default=0)
        most_characters = most * self._longest_token
        expected = f"at most {most} tokens, which have at most {most_characters} characters"
        require(longest <= most_characters, "prompt", expected, f"{longest} characters", "shorten it")
        if isinstance(body, ChatRequest):
            expected = f"at most {most} turns, as a prompt has at most as many tokens"
            require(len(body.messages) <= most, "messages", expected, len(body.messages), "send fewer")
            turns = [message.to_turn() for message in body.messages]
            fits = bool(model.tokenizer.chat_template) or [turn["role"] for turn in turns] == ["user"]
            expected = "one message of the user, as this model has no chat template"
            require(fits, "messages", expected, len(turns), "use /v1/completions")
            tools = [tool.to_template() for tool in body.tools] if body.functions else []
            effort = effort_options(model.tokenizer, body.reasoning_effort)
            options = {**effort, **(body.chat_template_kwargs or {})}
            return [model.encode(body.messages[-1].text, turns, tools, options)]
        require(body.best_of in (None, body.n), "best_of", f"n, which is {body.n}", body.best_of, "leave it out")
        fits = 1 <= len(body.prompt) * body.n <= 16 and all(body.prompt)
        require(fits, "prompt", "1 to 16 texts, n times, none of them empty", body.prompt[:2], "split the request")
        return [encode_plain_prompt(model.tokenizer, text) for text in body.prompt]

    async def _events(self, served: ServedRequest) -> AsyncIterator[tuple[Job, Update]]:
        """Yield the jobs' updates until all jobs have ended; abort the jobs if the client leaves.

        Raises:
            HTTPException: If a job fails.
        """
        outcome = "gone"
        has_text = False
        # The worker checks deadlines between calls of the model only, and a call may hang.
        too_late = (served.jobs[0], HTTPException(504, "the time limit of a request is over"))
        remaining = served.started + self.worker.limits.max_seconds - time.monotonic()
        alarm = asyncio.get_running_loop().call_later(remaining, served.events.put_nowait, too_late)
        try:
            while not all(job.result for job in served.jobs):
                job, event = await served.events.get()
                if isinstance(event, HTTPException):
                    outcome = "failed"
                    raise event
                job.result = event.generation
                if event.text and not has_text:
                    has_text = True
                    self._seconds.labels("first_text").observe(time.monotonic() - served.started)
                yield job, event
            outcome = "done"
        finally:
            alarm.cancel()
            for job in served.jobs:
                job.deadline = 0.0  # the worker drops the job, unless it has ended
            self.requests.labels(outcome).inc()
            self._seconds.labels("end").observe(time.monotonic() - served.started)
            for kind in ("prompt_tokens", "completion_tokens", "forwards"):
                self._counts.labels(kind).inc(served.usage[kind])
            log.info("%s %s %s", served.id, outcome, json.dumps(served.usage))
            log.debug("%s answered: %s", served.id, [job.result.text for job in served.jobs if job.result])

    async def _collect(self, served: ServedRequest) -> dict[str, Any]:
        """Return an answer's body."""
        pieces: dict[int, list[Piece]] = {id(job): [] for job in served.jobs}
        entries: dict[int, list[Any]] = {id(job): [] for job in served.jobs}
        async for job, update in self._events(served):
            pieces[id(job)] += _read_update(job, update)
            entries[id(job)] += update.logprobs
        choices = [served.make_choice(job, pieces[id(job)], entries[id(job)], self.model) for job in served.jobs]
        return served.make_answer(*choices, usage=served.answer_usage)

    async def _stream(self, served: ServedRequest) -> AsyncIterator[str]:
        """Yield an answer's server-sent events: text in text order, finish reasons, token counts."""
        size = getattr(self.worker.decoder, "slot_size", None) or 1
        try:
            async for job, update in self._events(served):
                pieces = _read_update(job, update)
                if not (pieces or update.rounds or update.logprobs or update.generation):
                    continue  # the text may be the beginning of a call
                choice = served.make_choice(job, pieces, update.logprobs, self.model)
                more = {"decode": {"slot_size": size, "rounds": update.rounds}} if job.wants_rounds else {}
                yield _format_event(served.make_answer(choice, **more))
        except HTTPException as error:
            yield _format_event(error_body(error))
            return
        if served.body.stream_options.include_usage:
            yield _format_event(served.make_answer(usage=served.answer_usage))
        yield "data: [DONE]\n\n"

    async def _collect_response(self, served: ServedRequest, builder: ResponseBuilder) -> dict[str, Any]:
        """Return a response's body."""
        async for _ in self._response_events(served, builder):
            pass
        return builder.response

    async def _stream_response(self, served: ServedRequest, builder: ResponseBuilder) -> AsyncIterator[str]:
        """Yield a response's server-sent events."""
        try:
            async for event in self._response_events(served, builder):
                yield f"event: {event['type']}\n{_format_event(event)}"
        except HTTPException as error:
            yield f"event: response.failed\n{_format_event(builder.fail(error.detail))}"

    async def _response_events(self, served: ServedRequest, builder: ResponseBuilder) -> AsyncIterator[dict[str, Any]]:
        """Yield a response's events."""
        for event in builder.begin():
            yield event
        async for job, update in self._events(served):
            builder.add_logprobs(update.logprobs)
            for piece in filter(None, _read_update(job, update)):
                for event in builder.add(piece):
                    yield event
        [job] = served.jobs
        assert job.result is not None
        for event in builder.finish(job.result.finish_reason, served.answer_usage):
            yield event


def _read_update(job: Job, update: Update) -> list[Piece]:
    """Return the text, thoughts and calls in an update."""
    if job.reader is None:
        return [update.text]
    return job.reader.read(update.text, is_last=update.generation is not None)


def _format_event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
