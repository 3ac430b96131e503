"""From a request of the API to jobs of the worker, and back to an answer or a stream."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from refusion_lit.data.encoding import encode_text
from refusion_lit.decoding import Generation
from refusion_lit.engine.checks import check_prompts
from refusion_lit.engine.output import TextStream
from refusion_lit.serving.protocol import ChatRequest, CompletionRequest, RequestError
from refusion_lit.serving.worker import Job, Update, Worker
from refusion_lit.text_model import TextModel
from refusion_lit.types import Prompt, SamplingParams

log = logging.getLogger("refusion_lit.serving")  # texts of users at level DEBUG only


@dataclass
class Run:
    """One request on its way.

    Attributes:
        asked: The request.
        jobs: One for each choice.
        news: What the worker tells: a choice and an event.
        started: When it arrived.
        first: When the first text came.
        ended: The choices' generations.
    """

    asked: ChatRequest | CompletionRequest
    jobs: list[Job] = field(default_factory=list)
    news: asyncio.Queue[tuple[int, Update | Generation | RequestError]] = field(default_factory=asyncio.Queue)
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    ended: dict[int, Generation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Name it."""
        self.is_chat = isinstance(self.asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"

    @property
    def usage(self) -> dict[str, Any]:
        """The counts, in OpenAI's form, and beside them forwards and tokens per forward."""
        num_prompt_tokens = sum(len(job.prompt.token_ids) for job in self.jobs) // self.asked.n
        num_tokens = sum(row.num_tokens for row in self.ended.values())
        num_forwards = sum(row.num_forwards for row in self.ended.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "forwards": num_forwards,
            "tokens_per_forward": round(num_tokens / num_forwards, 3) if num_forwards else None,
        }


class Metrics:
    """Figures in Prometheus's text format: requests, tokens, forwards and times."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "refusion_lit"}
        outcome = "Requests by outcome: done, failed, gone (the client left), refused"
        self.requests = Counter("requests", outcome, ["outcome"], **own)
        self._counts = Counter("counts", "Tokens and forwards, named as in an answer's usage", ["kind"], **own)
        times: dict[str, Any] = own | {"buckets": (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)}
        self._seconds = Histogram("seconds", "Time to the first text, and to the end of a request", ["until"], **times)
        Gauge("rows_in_flight", "Answers in flight", **own).set_function(lambda: worker.num_active)
        Gauge("waiting", "Answers that wait for a row", **own).set_function(lambda: worker.num_waiting)

    def ended(self, outcome: str, run: Run) -> None:
        """Count a request that has ended."""
        self.requests.labels(outcome).inc()
        for kind in ("prompt_tokens", "completion_tokens", "forwards"):
            self._counts.labels(kind).inc(run.usage[kind])
        self._seconds.labels("end").observe(time.monotonic() - run.started)
        if run.first is not None:
            self._seconds.labels("first_text").observe(run.first - run.started)


class Service:
    """Answers requests.

    Args:
        worker: Runs the jobs.
        name: The model's name.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker = worker
        self.name = name
        self.limits = worker.limits
        self.metrics = Metrics(worker)
        own = worker.model
        # A tokenizer serves one thread at a time: the worker's has its own.
        self.model = TextModel(own.backbone, copy.deepcopy(own.tokenizer), own.prompt_template)

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Answer a request.

        Raises:
            RequestError: If it is refused, or fails.
        """
        try:
            run = await self._begin(asked)
        except ValueError as error:
            self.metrics.requests.labels("refused").inc()
            raise error if isinstance(error, RequestError) else RequestError(400, str(error)) from error
        if asked.stream:
            return StreamingResponse(self._stream(run), media_type="text/event-stream")
        waiting = asyncio.create_task(self._collect(run))
        try:
            while not (await asyncio.wait({waiting}, timeout=0.5))[0]:  # seconds
                if await request.is_disconnected():
                    return Response(status_code=499)
        finally:
            waiting.cancel()  # does nothing to what is done
        return JSONResponse(waiting.result())

    async def _begin(self, asked: ChatRequest | CompletionRequest) -> Run:
        """Check a request, encode its prompts and submit its jobs.

        Raises:
            RequestError: If the server is loading, stopping or busy, or another model is asked for.
            ValueError: If the request asks for what cannot be done.
        """
        if asked.model != self.name:
            raise RequestError(404, f"model: expected {self.name!r}, got {asked.model[:60]!r}.")
        if not self.worker.is_ready:
            raise RequestError(503, "the model is loading.", headers={"Retry-After": "2"})
        sampling = self._sampling(asked)
        encoded = self._encode(asked)
        run = Run(asked)
        loop = asyncio.get_running_loop()
        for ids in encoded:
            prompt = Prompt(token_ids=tuple(ids), id="0")
            check_prompts(self.worker.checked, self.worker.decoder, [prompt], sampling)
            for number in range(asked.n):  # keys the noise of a choice

                def tell(event: Update | Generation | RequestError, choice: int = len(run.jobs)) -> None:
                    loop.call_soon_threadsafe(run.news.put_nowait, (choice, event))

                stream = TextStream(self.worker.model.detokenize, sampling.stop)
                deadline = run.started + self.limits.max_seconds
                run.jobs.append(
                    Job(prompt=replace(prompt, id=str(number)), sampling=sampling, tell=tell, deadline=deadline,
                        stream=stream, watched=run.asked.stream_options.include_decode)
                )  # fmt: skip
        self.worker.submit(run.jobs)
        log.debug("%s asked: %s", run.id, asked.model_dump_json())
        return run

    def _sampling(self, asked: ChatRequest | CompletionRequest) -> SamplingParams:
        """Return a request's sampling options: its own, and the server's for the rest."""
        default = self.worker.sampling
        most = self.limits.max_answer_tokens
        limit = min(default.max_new_tokens, most) if asked.max_tokens is None else asked.max_tokens
        if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
            limit = asked.max_completion_tokens
        if limit > most:
            raise ValueError(f"max_tokens: expected at most {most}, got {limit}; lower it.")
        stop = None if asked.stop is None else (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
        own = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k, "stop": stop}
        given = {name: value for name, value in own.items() if value is not None}
        sampling = replace(default, max_new_tokens=limit, **given)
        if asked.seed is not None or sampling.temperature > 0:
            seed = secrets.randbits(31) if asked.seed is None else asked.seed  # told in the answer
            sampling = replace(sampling, seed=seed)
        self.worker.decoder.check(sampling)
        return sampling

    def _encode(self, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Return the prompts' tokens; names of special tokens in texts stay text."""
        if isinstance(asked, ChatRequest):
            turns = [message.model_dump() for message in asked.messages]
            if not self.model.tokenizer.chat_template and [turn["role"] for turn in turns] != ["user"]:
                raise ValueError("messages: expected one message of the user, as this model has no chat template.")
            encoded = [self.model.encode(turns[-1]["content"], turns)]
        else:
            texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
            if len(texts) * asked.n > 16 or not all(texts):
                raise ValueError("prompt: expected 1 to 16 texts, none of them empty.")
            encoded = [encode_text(self.model.tokenizer, text) for text in texts]
        longest = max(map(len, encoded))
        most = self.limits.max_prompt_tokens
        if longest > most:
            raise ValueError(f"prompt: expected at most {most} tokens, got {longest}; shorten it.")
        return encoded

    async def _events(self, run: Run) -> AsyncIterator[tuple[int, Update | Generation]]:
        """Yield what happens until all choices have ended; leave nothing in flight when the client goes.

        Raises:
            RequestError: If a choice fails.
        """
        outcome = "gone"
        try:
            while len(run.ended) < len(run.jobs):
                choice, event = await run.news.get()
                if isinstance(event, RequestError):
                    outcome = "failed"
                    raise event
                if isinstance(event, Generation):
                    run.ended[choice] = event
                elif event.text and run.first is None:
                    run.first = time.monotonic()
                yield choice, event
            outcome = "done"
        finally:
            self.worker.abort(run.jobs)
            self.metrics.ended(outcome, run)
            log.info("%s %s %s", run.id, outcome, json.dumps(run.usage))
            log.debug("%s answered: %s", run.id, [row.text for row in run.ended.values()])

    async def _collect(self, run: Run) -> dict[str, Any]:
        """Return an answer's body."""
        async for _ in self._events(run):
            pass
        choices = []
        for choice, row in sorted(run.ended.items()):
            text = {"message": {"role": "assistant", "content": row.text}} if run.is_chat else {"text": row.text}
            choices.append({"index": choice, **text, "logprobs": None, "finish_reason": _reason(row)})
        kind = "chat.completion" if run.is_chat else "text_completion"
        return self._envelope(run, kind, choices) | {"usage": run.usage}

    async def _stream(self, run: Run) -> AsyncIterator[str]:
        """Yield an answer's server-sent events: text in text order, a reason at the end of each choice, counts."""
        kind = "chat.completion.chunk" if run.is_chat else "text_completion"

        def chunk(choice: int, text: str, reason: str | None = None, **more: object) -> str:
            delta = {"role": "assistant", "content": text} if text or reason is None else {}
            part = {"delta": delta} if run.is_chat else {"text": text}
            choices = [{"index": choice, **part, "logprobs": None, "finish_reason": reason}]
            return f"data: {json.dumps(self._envelope(run, kind, choices) | more)}\n\n"

        try:
            async for choice, event in self._events(run):
                if isinstance(event, Generation):
                    yield chunk(choice, "", _reason(event))
                elif run.asked.stream_options.include_decode:
                    yield chunk(choice, event.text, decode=self._decode(run.jobs[choice], event))
                else:
                    yield chunk(choice, event.text)
        except RequestError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
            return
        if run.asked.stream_options.include_usage:
            yield f"data: {json.dumps(self._envelope(run, kind, []) | {'usage': run.usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _envelope(self, run: Run, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": run.id, "object": kind, "created": int(time.time()), "model": self.name}
        return head | {"seed": run.jobs[0].sampling.seed, "choices": choices}

    def _decode(self, job: Job, update: Update) -> dict[str, Any]:
        """Return the forwards of an update: what each drafted and committed, by place, with the tokens' texts."""
        start = len(job.prompt.token_ids)
        rounds = []
        for entry in update.rounds:
            drafted = zip(entry.positions, entry.tokens, strict=True)
            texts = [[position - start, self.model.piece(token)] for position, token in drafted]
            committed = [position - start for position in entry.accepted]
            rounds.append({"phase": entry.phase, "drafted": texts, "committed": committed})
        size = getattr(self.worker.decoder, "slot_size", None) or 1
        return {"forwards": update.num_forwards, "slot_size": size, "rounds": rounds}


def _reason(row: Generation) -> str:
    return "stop" if row.finish_reason in ("eos", "stop") else "length"
