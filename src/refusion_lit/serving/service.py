"""From a request of the API to jobs of the worker, and back to an answer or a stream."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException

from refusion_lit.data.encoding import TextStream, encode_text
from refusion_lit.data.schemas import Schemas
from refusion_lit.engine.checks import check_prompts
from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, error_body
from refusion_lit.serving.worker import Job, Update, Worker, log
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.require import require


@dataclass
class ServedRequest:
    """One request on its way.

    Attributes:
        asked: The request.
        id: Its name in the answer and in the log.
        started: When it arrived.
        jobs: One for each choice.
        news: What the worker tells of the jobs.
    """

    asked: ChatRequest | CompletionRequest
    id: str
    started: float = field(default_factory=time.monotonic)
    jobs: list[Job] = field(default_factory=list)
    news: asyncio.Queue[tuple[Job, Update | HTTPException]] = field(default_factory=asyncio.Queue)

    @property
    def usage(self) -> dict[str, Any]:
        """The counts, in OpenAI's form, and beside them forwards and tokens per forward."""
        ended = [job.ended for job in self.jobs if job.ended]
        num_prompt_tokens = sum(len(job.prompt.token_ids) for job in self.jobs) // self.asked.n
        num_tokens = sum(row.num_tokens for row in ended)
        num_forwards = sum(row.num_forwards for row in ended)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "forwards": num_forwards,
            "tokens_per_forward": round(num_tokens / num_forwards, 3) if num_forwards else None,
        }

    def body(self, *choices: dict[str, Any], **more: object) -> dict[str, Any]:
        """Return the body of an answer, or of a chunk of a stream."""
        kind = f"chat.completion{'.chunk' * self.asked.stream}" if self.asked.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.asked.model}
        return head | {"seed": self.jobs[0].sampling.seed, "choices": choices, **more}

    def choice(self, job: Job, text: str) -> dict[str, Any]:
        """Return a choice, or the part of it that a chunk has; the first one names the role."""
        reason = job.ended and ("stop" if job.ended.finish_reason in ("eos", "stop") else "length")
        message = {"content": text} if job.has_begun else {"role": "assistant", "content": text}
        job.has_begun = True
        content = {"delta" if self.asked.stream else "message": message} if self.asked.is_chat else {"text": text}
        return {"index": self.jobs.index(job), **content, "logprobs": None, "finish_reason": reason}


class Service:
    """Answers requests.

    Args:
        worker: Runs the jobs.
        name: The model's name.

    Attributes:
        registry: Figures for Prometheus: requests, tokens, forwards and times.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker = worker
        self.name = name
        # A tokenizer serves one thread at a time: the worker's has its own, and so have those that compile schemas.
        self.model = copy.copy(worker.model)
        self.model.tokenizer = copy.deepcopy(worker.model.tokenizer)
        self.schemas = Schemas(copy.deepcopy(worker.model.tokenizer), worker.model.backbone.special_tokens)
        self.registry = CollectorRegistry()
        to: dict[str, Any] = {"registry": self.registry, "namespace": "refusion_lit"}
        self.requests = Counter("requests", "Requests: done, failed, gone (client left), refused", ["outcome"], **to)
        self._counts = Counter("counts", "Tokens and forwards, named as in an answer's usage", ["kind"], **to)
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
        self._seconds = Histogram("seconds", "Time to the first text, and to the end", ["until"], buckets=buckets, **to)
        Gauge("rows_in_flight", "Answers in flight", **to).set_function(lambda: len(worker.active))
        Gauge("waiting", "Answers that wait for a row", **to).set_function(lambda: len(worker.waiting))

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Answer a request.

        Raises:
            HTTPException: If it is refused, or fails.
        """
        try:
            served = await self._begin(asked)
        except (ValueError, HTTPException) as error:
            self.requests.labels("refused").inc()
            message = str(error).replace("max_new_tokens", "max_tokens")  # the API's names
            message = re.sub("^json_schema(?=:)", "response_format", message)
            raise error if isinstance(error, HTTPException) else HTTPException(400, message) from error
        if asked.stream:
            return StreamingResponse(self._stream(served), media_type="text/event-stream")
        collecting = asyncio.create_task(self._collect(served))
        while not (await asyncio.wait({collecting}, timeout=0.5))[0]:  # seconds
            if await request.is_disconnected():
                collecting.cancel()
                return Response(status_code=499)
        return JSONResponse(collecting.result())

    async def _begin(self, asked: ChatRequest | CompletionRequest) -> ServedRequest:
        """Check a request, encode its prompts and submit its jobs; all this takes part of its time limit.

        Raises:
            HTTPException: If the server is loading, stopping or busy, or another model is asked for.
            ValueError: If the request asks for what cannot be done.
        """
        served = ServedRequest(asked, f"{'chat' * asked.is_chat}cmpl-{secrets.token_hex(12)}")
        worker = self.worker
        if asked.model != self.name:
            raise HTTPException(404, f"model: expected {self.name!r}, got {asked.model[:60]!r}; see /v1/models.")
        if not worker.is_ready:
            raise HTTPException(503, "the model is loading.", headers={"Retry-After": "2"})
        sampling = self._sampling(asked)
        prompts = [Prompt(token_ids=tuple(ids), id="0") for ids in self._encode(asked)]
        schema = asked.response_format.schema_of_answer()
        if schema is not None:
            # Compiling a schema may take a while: in a thread, so that others are served meanwhile.
            prompts = await asyncio.to_thread(self.schemas.constrain, prompts, schema, worker.decoder, sampling)
        longest = max(len(prompt.token_ids) + prompt.num_uncounted for prompt in prompts)
        most = worker.limits.max_prompt_tokens
        require(longest <= most, "prompt", f"at most {most} tokens, with those of a schema", longest, "shorten it")
        check_prompts(worker.checked, worker.decoder, prompts, sampling)
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, served.news.put_nowait)
        served.jobs = [
            Job(prompt=replace(prompt, id=str(number)), sampling=sampling, tell=tell,
                deadline=served.started + worker.limits.max_seconds, watched=asked.stream_options.include_decode,
                stream=TextStream(worker.model.detokenize, sampling))
            for prompt in prompts
            for number in range(asked.n)  # keys the noise of a choice
        ]  # fmt: skip
        worker.submit(served.jobs)
        log.debug("%s asked: %r", served.id, asked)
        return served

    def _sampling(self, asked: ChatRequest | CompletionRequest) -> SamplingParams:
        """Return a request's sampling options: its own, and the server's for the rest."""
        default = self.worker.sampling
        most = self.worker.limits.max_answer_tokens
        limit = min(default.max_new_tokens, most) if asked.max_tokens is None else asked.max_tokens
        require(limit <= most, "max_tokens", f"at most {most}", limit, "lower it")
        own = asked.model_dump(include={"temperature", "top_p", "top_k", "stop", "seed"}, exclude_none=True)
        sampling = replace(default, max_new_tokens=limit, **own)
        if asked.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=secrets.randbits(31))  # told in the answer
        self.worker.decoder.check(sampling)
        return sampling

    def _encode(self, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Return the prompts' tokens; names of special tokens in texts stay text."""
        if isinstance(asked, ChatRequest):
            texts = ["".join(part.text for part in message.content) for message in asked.messages]
            turns = [{"role": each.role, "content": text} for each, text in zip(asked.messages, texts, strict=True)]
            fits = bool(self.model.tokenizer.chat_template) or [turn["role"] for turn in turns] == ["user"]
            wanted = "one message of the user, as this model has no chat template"
            require(fits, "messages", wanted, len(turns), "use /v1/completions")
            return [self.model.encode(texts[-1], turns)]
        fits = 1 <= len(asked.prompt) * asked.n <= 16 and all(asked.prompt)
        require(fits, "prompt", "1 to 16 texts, n times, none of them empty", asked.prompt[:2], "split the request")
        return [encode_text(self.model.tokenizer, text) for text in asked.prompt]

    async def _events(self, served: ServedRequest) -> AsyncIterator[tuple[Job, Update]]:
        """Yield what happens until all choices have ended; leave nothing in flight when the client goes.

        Raises:
            HTTPException: If a choice fails.
        """
        outcome = "gone"
        has_text = False
        # Not told by the worker, which looks between calls of the model: one that hangs keeps no client.
        too_late = (served.jobs[0], HTTPException(504, "the time limit of a request is over"))
        left = served.started + self.worker.limits.max_seconds - time.monotonic()
        alarm = asyncio.get_running_loop().call_later(left, served.news.put_nowait, too_late)
        try:
            while not all(job.ended for job in served.jobs):
                job, event = await served.news.get()
                if isinstance(event, HTTPException):
                    outcome = "failed"
                    raise event
                job.ended = event.generation
                if event.text and not has_text:
                    has_text = True
                    self._seconds.labels("first_text").observe(time.monotonic() - served.started)
                yield job, event
            outcome = "done"
        finally:
            alarm.cancel()
            for job in served.jobs:
                job.deadline = 0.0  # the worker drops it, unless it has ended
            self.requests.labels(outcome).inc()
            self._seconds.labels("end").observe(time.monotonic() - served.started)
            for kind in ("prompt_tokens", "completion_tokens", "forwards"):
                self._counts.labels(kind).inc(served.usage[kind])
            log.info("%s %s %s", served.id, outcome, json.dumps(served.usage))
            log.debug("%s answered: %s", served.id, [job.ended.text for job in served.jobs if job.ended])

    async def _collect(self, served: ServedRequest) -> dict[str, Any]:
        """Return an answer's body."""
        async for _ in self._events(served):
            pass
        choices = [served.choice(job, job.ended.text) for job in served.jobs if job.ended]
        return served.body(*choices, usage=served.usage)

    async def _stream(self, served: ServedRequest) -> AsyncIterator[str]:
        """Yield an answer's server-sent events: text in text order, a reason at the end of each choice, counts."""
        size = getattr(self.worker.decoder, "slot_size", None) or 1
        try:
            async for job, update in self._events(served):
                more = {"decode": {"slot_size": size, "rounds": update.rounds}} if job.watched else {}
                yield _sent(served.body(served.choice(job, update.text), **more))
        except HTTPException as error:
            yield _sent(error_body(error))
            return
        if served.asked.stream_options.include_usage:
            yield _sent(served.body(usage=served.usage))
        yield "data: [DONE]\n\n"


def _sent(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
