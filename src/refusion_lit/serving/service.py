"""From a request of the API to jobs of the worker, and back to an answer or a stream."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from refusion_lit.api import TextModel
from refusion_lit.data.encoding import encode_text
from refusion_lit.data.schemas import Schemas
from refusion_lit.decoding import Generation
from refusion_lit.engine.checks import check_prompts
from refusion_lit.serving.metrics import Metrics
from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, RequestError
from refusion_lit.serving.worker import BusyError, DrainingError, Failure, Job, Update, Worker
from refusion_lit.types import Prompt, SamplingParams

log = logging.getLogger("refusion_lit.serving")
_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_POLL_SECONDS = 0.5
"""How often an answer that is not streamed looks whether its client is still there."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may take.

    Attributes:
        max_prompt_tokens: Maximum length of a prompt in tokens.
        max_answer_tokens: Maximum length of an answer in tokens.
        max_seconds: Maximum time from arrival to the end of an answer.
        max_waiting: Maximum number of answers that wait for a row; further requests get 429.
        max_body_bytes: Maximum size of a request.
    """

    max_prompt_tokens: int = 4096
    max_answer_tokens: int = 1024
    max_seconds: float = 300.0
    max_waiting: int = 64
    max_body_bytes: int = 1_000_000


@dataclass(kw_only=True)
class Run:
    """One request on its way.

    Attributes:
        id: Its name in answers and logs.
        is_chat: Whether it came to the chat endpoint.
        num_prompt_tokens: Tokens of its prompts.
        sampling: Its sampling options.
        include_usage: Whether a stream ends with the counts.
        include_decode: Whether a stream tells every forward.
        jobs: One for each choice.
        news: What the worker tells: a choice and an event.
        numbers: The jobs' numbers at the worker.
        started: When it arrived.
        first: When the first text came.
        ended: The choices' generations.
    """

    id: str
    is_chat: bool
    num_prompt_tokens: int
    sampling: SamplingParams
    include_usage: bool
    include_decode: bool
    jobs: list[Job] = field(default_factory=list)
    news: asyncio.Queue[tuple[int, Update | Generation | Failure]] = field(default_factory=asyncio.Queue)
    numbers: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    ended: dict[int, Generation] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, Any]:
        """The counts, in OpenAI's form, and beside them forwards and tokens per forward."""
        num_tokens = sum(row.num_tokens for row in self.ended.values())
        num_forwards = sum(row.num_forwards for row in self.ended.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
            "forwards": num_forwards,
            "tokens_per_forward": round(num_tokens / num_forwards, 3) if num_forwards else None,
        }


class Service:
    """Answers requests.

    Args:
        worker: Runs the jobs.
        name: The model's name.
        sampling: What a request does not say.
        limits: What a request may take.
        log_prompts: Whether logs have prompts and answers.
    """

    def __init__(
        self, worker: Worker, name: str, sampling: SamplingParams, limits: Limits, *, log_prompts: bool = False
    ) -> None:
        self.worker = worker
        self.name = name
        self.sampling = sampling
        self.limits = limits
        self.log_prompts = log_prompts
        self.metrics = Metrics(worker)
        self.created = int(time.time())
        own = worker.model
        # A tokenizer serves one thread at a time: the worker's has its own.
        self.model = TextModel(own.backbone, copy.deepcopy(own.tokenizer), own.prompt_template)
        self.schemas = Schemas(self.model.tokenizer, own.backbone.special_tokens)

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Answer a request.

        Raises:
            RequestError: If it is refused, or fails.
        """
        run = await self._begin(asked)
        if asked.stream:
            return StreamingResponse(self._stream(run), media_type="text/event-stream")
        waiting = asyncio.create_task(self._collect(run))
        try:
            while not (await asyncio.wait({waiting}, timeout=_POLL_SECONDS))[0]:
                if await request.is_disconnected():
                    return Response(status_code=499)
        finally:
            waiting.cancel()  # does nothing to what is done
        return JSONResponse(waiting.result())

    async def _begin(self, asked: ChatRequest | CompletionRequest) -> Run:
        """Check a request, encode its prompts and submit its jobs.

        Raises:
            RequestError: If the server is stopping or busy, or the request asks for what cannot be done.
        """
        if asked.model != self.name:
            raise RequestError(404, f"model: expected {self.name!r}, got {asked.model[:60]!r}.", "model")
        if not self.worker.is_ready:
            raise RequestError(503, "the model is loading.", headers={"Retry-After": "2"})
        try:
            sampling = self._sampling(asked)
            encoded = self._encode(asked)
            schema = None if asked.response_format is None else asked.response_format.schema_of_answer
            prompts = await self._prompts(encoded, schema, asked.n, sampling)
        except RequestError:
            raise
        except ValueError as error:
            name = str(error).partition(":")[0]
            raise RequestError(400, str(error), name if name.isidentifier() else None) from error
        options = asked.stream_options
        run = Run(
            id=f"{'chatcmpl' if isinstance(asked, ChatRequest) else 'cmpl'}-{secrets.token_hex(12)}",
            is_chat=isinstance(asked, ChatRequest), num_prompt_tokens=sum(map(len, encoded)), sampling=sampling,
            include_usage=options.include_usage, include_decode=options.include_decode,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        for choice, candidates in enumerate(prompts):

            def tell(event: Update | Generation | Failure, choice: int = choice) -> None:
                loop.call_soon_threadsafe(run.news.put_nowait, (choice, event))

            deadline = run.started + self.limits.max_seconds
            watched = run.include_decode
            run.jobs.append(Job(prompts=candidates, sampling=sampling, tell=tell, deadline=deadline, watched=watched))
        try:
            run.numbers = self.worker.submit(run.jobs)
        except BusyError as error:
            self.metrics.count("busy")
            wait = {"Retry-After": str(error.retry_after)}
            raise RequestError(429, "the queue is full; try again later.", headers=wait) from error
        except DrainingError as error:
            raise RequestError(503, "the server is stopping.", headers={"Retry-After": "30"}) from error
        if self.log_prompts:
            log.info("%s asked: %s", run.id, asked.model_dump_json())
        return run

    def _sampling(self, asked: ChatRequest | CompletionRequest) -> SamplingParams:
        """Return a request's sampling options: its own, and the server's for the rest."""
        most = self.limits.max_answer_tokens
        limit = min(self.sampling.max_new_tokens, most) if asked.limit is None else asked.limit
        if limit > most:
            raise RequestError(400, f"max_tokens: expected at most {most}, got {limit}; lower it.", "max_tokens")
        own = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k, "stop": asked.stops}
        given = {name: value for name, value in own.items() if value is not None}
        sampling = replace(self.sampling, max_new_tokens=limit, **given)
        if asked.seed is not None:
            sampling = replace(sampling, seed=asked.seed)
        elif sampling.temperature > 0:
            sampling = replace(sampling, seed=secrets.randbits(31))  # told in the answer
        self.worker.decoder.check(sampling)
        return sampling

    def _encode(self, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Return the prompts' tokens; names of special tokens in texts stay text."""
        if isinstance(asked, CompletionRequest):
            texts = asked.texts
            if not 1 <= len(texts) * asked.n <= 16 or not all(texts):
                raise RequestError(400, "prompt: expected 1 to 16 texts, none of them empty.", "prompt")
            encoded = [encode_text(self.model.tokenizer, text) for text in texts]
        else:
            turns = [message.turn() for message in asked.messages]
            if not self.model.tokenizer.chat_template and [turn["role"] for turn in turns] != ["user"]:
                message = "messages: expected one message of the user, as this model has no chat template."
                raise RequestError(400, message, "messages")
            encoded = [self.model.encode(turns[-1]["content"], turns)]
        longest = max(map(len, encoded))
        most = self.limits.max_prompt_tokens
        if longest > most:
            raise RequestError(400, f"prompt: expected at most {most} tokens, got {longest}; shorten it.", "prompt")
        return encoded

    async def _prompts(
        self, encoded: Sequence[Sequence[int]], schema: dict[str, Any] | bool | None, num: int, sampling: SamplingParams
    ) -> list[list[Prompt]]:
        """Return the candidates of each choice; a choice's number keys its noise."""
        found = []
        for ids in encoded:
            prompt = Prompt(token_ids=tuple(ids), id="0")
            candidates = [prompt]
            if schema is not None:
                # Compiling a schema may take a while: in a thread, so that others are served meanwhile.
                make = self.schemas.prompts
                candidates = await asyncio.to_thread(make, prompt, schema, self.worker.decoder, sampling.max_new_tokens)
            check_prompts(self.worker.checked, self.worker.decoder, candidates, sampling)
            found += [[replace(each, id=str(i)) for each in candidates] for i in range(num)]
        return found

    async def _events(self, run: Run) -> AsyncIterator[tuple[int, Update | Generation]]:
        """Yield what happens until all choices have ended; leave nothing behind when the client goes.

        Raises:
            RequestError: If a choice fails.
        """
        outcome = "gone"
        try:
            while len(run.ended) < len(run.jobs):
                choice, event = await run.news.get()
                if isinstance(event, Failure):
                    outcome = "failed"
                    raise RequestError(event.status, event.message)
                if isinstance(event, Update) and event.text and run.first is None:
                    run.first = time.monotonic()
                if isinstance(event, Generation):
                    run.ended[choice] = event
                yield choice, event
            outcome = "done"
        finally:
            self._end(run, outcome)

    def _end(self, run: Run, outcome: str) -> None:
        """Abort what still runs, and count and log the request."""
        if outcome != "done":
            self.worker.abort(run.numbers)
        self.metrics.ended(outcome, run.usage, time.monotonic() - run.started, run.first and run.first - run.started)
        log.info("%s %s %s", run.id, outcome, json.dumps(run.usage))
        if self.log_prompts:
            log.info("%s answered: %s", run.id, json.dumps([row.text for row in run.ended.values()]))

    async def _collect(self, run: Run) -> dict[str, Any]:
        async for _ in self._events(run):
            pass
        choices = []
        for choice, row in sorted(run.ended.items()):
            text = {"message": {"role": "assistant", "content": row.text}} if run.is_chat else {"text": row.text}
            choices.append({"index": choice, **text, "logprobs": None, "finish_reason": _reason(row)})
        return self._envelope(run, choices, "chat.completion" if run.is_chat else "text_completion", run.usage)

    async def _stream(self, run: Run) -> AsyncIterator[str]:
        """Yield an answer's server-sent events: text in text order, a reason at the end of each choice, counts."""
        kind = "chat.completion.chunk" if run.is_chat else "text_completion"

        def chunk(choice: int, text: str, reason: str | None = None, **more: object) -> str:
            delta: dict[str, Any] = {"content": text} if text or reason is None else {}
            part = {"delta": delta} if run.is_chat else {"text": text}
            choices = [{"index": choice, **part, "logprobs": None, "finish_reason": reason}]
            return f"data: {json.dumps(self._envelope(run, choices, kind) | more)}\n\n"

        if run.is_chat:
            choices = [{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                       for i in range(len(run.jobs))]  # fmt: skip
            yield f"data: {json.dumps(self._envelope(run, choices, kind))}\n\n"
        try:
            async for choice, event in self._events(run):
                if isinstance(event, Generation):
                    yield chunk(choice, "", _reason(event))
                elif run.include_decode:
                    yield chunk(choice, event.text, decode=self._decode(run.jobs[choice], event))
                else:
                    yield chunk(choice, event.text)
        except RequestError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
            return
        if run.include_usage:
            yield f"data: {json.dumps(self._envelope(run, [], kind, run.usage))}\n\n"
        yield "data: [DONE]\n\n"

    def _envelope(
        self, run: Run, choices: list[dict[str, Any]], kind: str, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        created = int(time.time())
        common = {"id": run.id, "object": kind, "created": created, "model": self.name, "seed": run.sampling.seed}
        return common | {"choices": choices} | ({} if usage is None else {"usage": usage})

    def _decode(self, job: Job, update: Update) -> dict[str, Any]:
        """Return the forwards of an update: what each drafted and committed, by place, with the tokens' texts."""
        start = len(job.prompts[0].token_ids)
        rounds = [
            {
                "phase": entry.phase,
                "drafted": [[position - start, self.model.piece(token)]
                            for position, token in zip(entry.positions, entry.tokens, strict=True)],
                "committed": [position - start for position in entry.accepted],
            }
            for entry in update.rounds
        ]  # fmt: skip
        size = getattr(self.worker.decoder, "slot_size", None) or 1
        return {"forwards": update.num_forwards, "slot_size": size, "rounds": rounds}


def _reason(row: Generation) -> str:
    return _REASONS.get(row.finish_reason, "length")
