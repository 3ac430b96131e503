"""Soak test of the server: texts, tools, log-probabilities, aborts and limits; no answer differs, memory must settle.

usage: python -m benchmarks.serve_soak [--minutes 30] [--clients 16] [--pause 0.2] [--output FILE]

One process has OpenAI's asynchronous clients and two servers, which decode a tiny random model from left to right and
in any order. Requests are drawn from cases whose answers were decoded alone, without a server: completions, chats with
and without calls of tools, and responses, with greedy and sampled tokens and log-probabilities. One request in five is
given up in mid-stream, and one in twenty is wrong and must be refused. The queue is short and requests have a time
limit, so some requests get 429, 504 or 408. Clients pause between requests, so that the processor has time for other
work. Resident memory, open files and threads are read every minute, memory after ``malloc_trim``; the first half of the
time is warm-up for memory.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
from benchmarks.common import ROOT, resident_bytes, write

from refusion_lit.constraints.tool_calls import CallPiece, CallReader, find_tool_format
from refusion_lit.data.encoding import encode_plain_prompt
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.serving import Limits
from refusion_lit.serving.app import Server, build_app
from refusion_lit.serving.protocol import Function
from refusion_lit.serving.service import Service
from refusion_lit.serving.worker import Worker
from refusion_lit.text_model import TextModel
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams

sys.path.append(str(ROOT / "tests"))

from support.tools import SCHEMAS, TOOLS, make_tool_model

DECODERS: dict[str, Decoder] = {"Autoregressive": Autoregressive(), "ReFusion": ReFusion(slot_size=4)}
QUERIES = ("Rome?", "1+1", 'Add "7" and 8,\nthen more.')
NUM_TOP = 2
LIMITS = Limits(max_waiting=2, max_seconds=5.0)
WRONG: list[dict[str, Any]] = [
    {"max_tokens": 100_000}, {"tools": [*TOOLS, TOOLS[0]]}, {"top_logprobs": 50}, {"logit_bias": {"5": 1}},
    {"stop": [""]}, {"tool_choice": "required"}, {"seed": True}, {"messages": []},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
    {"extra_body": {"no_such_field": [[[{}]]]}},
]  # fmt: skip


@dataclass
class Answer:
    """What a client has received, or what was decoded without a server."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def begins_with(self, other: Answer, *, is_whole: bool) -> bool:
        """Return whether another answer is this answer, or the beginning of it."""
        num = len(other.tokens)
        logprobs = zip(other.logprobs, self.logprobs[:num], strict=True)
        if other.tokens != self.tokens[:num] or any(abs(a - b) > 1e-3 for a, b in logprobs):
            return False
        if is_whole:
            return (other.text, other.calls, num) == (self.text, self.calls, len(self.tokens))
        names = [name for name, _ in other.calls] == [name for name, _ in self.calls[: len(other.calls)]]
        whole = all(a == b for (_, a), (_, b) in zip(other.calls[:-1], self.calls, strict=False))
        last = not other.calls or self.calls[len(other.calls) - 1][1].startswith(other.calls[-1][1])
        return self.text.startswith(other.text) and names and whole and last


@dataclass
class Case:
    """A request and its answer."""

    kind: str  # an endpoint
    options: dict[str, Any]
    expected: Answer


def make_cases(model: TextModel, decoder: Decoder) -> list[Case]:
    """Return requests with answers that were decoded alone."""
    tool_format = find_tool_format(model.tokenizer.chat_template)
    assert tool_format is not None
    cases = []
    for seed, query in enumerate(QUERIES):
        for length, temperature in ((5, 0.0), (60, 1.0), (200, 0.0), (200, 1.0)):
            sampling = SamplingParams(max_new_tokens=length, temperature=temperature, seed=seed)
            options: dict[str, Any] = {"temperature": temperature, "seed": seed}

            def decode(prompt: Prompt, functions: Any = None, sampling: SamplingParams = sampling) -> Answer:
                if functions:
                    [prompt] = model.schemas.constrain_calls(
                        [prompt], functions, tool_format, decoder, sampling,
                        is_parallel=len(functions) > 1,
                    )  # fmt: skip
                [row] = model.decode([prompt], decoder, sampling, num_top_logprobs=NUM_TOP).rows
                answer = Answer(row.text)
                for token, entry in zip(row.token_ids, row.logprobs, strict=True):
                    if token not in model.backbone.special_tokens.eos_token_ids:
                        answer.tokens.append(model.token_text(token))
                        answer.logprobs.append(0.0 if entry is None else entry.logprob)
                if functions:
                    reader = CallReader(tool_format, functions, is_constrained=True)
                    answer.text = ""
                    for piece in reader.read(row.text, is_last=True):
                        assert isinstance(piece, CallPiece)
                        _add_call(answer, piece.name, piece.arguments)
                return answer

            plain = Prompt(token_ids=tuple(encode_plain_prompt(model.tokenizer, query)), id="0")
            body = {**options, "prompt": query, "max_tokens": length}
            cases.append(Case("completions", {**body, "logprobs": NUM_TOP}, decode(plain)))
            messages = [{"role": "user", "content": query}]
            chat = Prompt(token_ids=tuple(model.encode(query, messages)), id="0")
            body = {**options, "messages": messages, "max_tokens": length}
            with_logprobs = {"logprobs": True, "top_logprobs": NUM_TOP}
            cases.append(Case("chat", body | with_logprobs, decode(chat)))
            body = {"temperature": temperature, "input": query, "max_output_tokens": length,
                    "include": ["message.output_text.logprobs"], "top_logprobs": NUM_TOP,
                    "extra_body": {"seed": seed}}  # fmt: skip
            cases.append(Case("responses", body, cases[-1].expected))
            if length < 200:
                continue
            tools = Prompt(token_ids=tuple(model.encode(query, messages, TOOLS)), id="0")
            every = {name: Function(name=name, parameters=schema).to_schema() for name, schema in SCHEMAS.items()}
            for choice in ("required", "add"):
                functions = every if choice == "required" else {choice: every[choice]}
                answer = decode(tools, functions)
                named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
                body = {**options, "messages": messages, "max_tokens": length, "tools": TOOLS, "tool_choice": named}
                cases.append(Case("chat", body | with_logprobs, answer))
                body = {"temperature": temperature, "input": query, "max_output_tokens": length,
                        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
                        "tool_choice": choice if choice == "required" else {"type": "function", "name": choice},
                        "extra_body": {"seed": seed}}  # fmt: skip
                cases.append(Case("responses", body, Answer(answer.text, answer.calls)))
    return cases


def _add_call(answer: Answer, name: str | None, arguments: str) -> None:
    if name is not None:
        answer.calls.append([name, ""])
    answer.calls[-1][1] += arguments


def read_chunk(answer: Answer, kind: str, chunk: Any) -> bool:
    """Add a chunk of a stream to an answer; return whether the answer is complete."""
    if kind == "responses":
        if chunk.type == "response.output_text.delta":
            answer.text += chunk.delta
            answer.tokens += [entry.token for entry in chunk.logprobs]
            answer.logprobs += [entry.logprob for entry in chunk.logprobs]
        elif chunk.type == "response.output_item.added" and chunk.item.type == "function_call":
            _add_call(answer, chunk.item.name, "")
        elif chunk.type == "response.function_call_arguments.delta":
            _add_call(answer, None, chunk.delta)
        elif chunk.type == "response.failed":
            raise openai.APIError(chunk.response.error.message, request=None, body=None)  # type: ignore[arg-type]
        return chunk.type in ("response.completed", "response.incomplete")
    [choice] = chunk.choices
    answer.text += (choice.text if kind == "completions" else choice.delta.content) or ""
    for call in (kind == "chat" and choice.delta.tool_calls) or []:
        _add_call(answer, call.function.name, call.function.arguments)
    if choice.logprobs is not None and kind == "chat":
        answer.tokens += [entry.token for entry in choice.logprobs.content]
        answer.logprobs += [entry.logprob or 0.0 for entry in choice.logprobs.content]
    elif choice.logprobs is not None:
        answer.tokens += choice.logprobs.tokens
        answer.logprobs += [logprob or 0.0 for logprob in choice.logprobs.token_logprobs]
    return choice.finish_reason is not None


def describe_causes(error: BaseException | None) -> str:
    """Return an exception and what it was raised from, since HTTP clients wrap the system's error several times."""
    names = []
    while error is not None:
        names.append(repr(error))
        error = error.__cause__ or error.__context__
    return " from ".join(names)


class Soak:
    """Clients and what they have counted."""

    def __init__(self, urls: dict[str, str], cases: dict[str, list[Case]], until: float, pause: float) -> None:
        self.urls = urls
        self.cases = cases
        self.until = until
        self.pause = pause
        names = ("answers", "calls", "given_up", "refused", "busy", "timed_out", "different", "lost")
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        self.examples: list[str] = []
        self.log: deque[logging.LogRecord] = deque(maxlen=100)
        handler = logging.Handler()
        handler.emit = self.log.append  # type: ignore[method-assign]
        for name in ("refusion_lit.serving", "uvicorn.error"):
            logging.getLogger(name).addHandler(handler)
        logging.getLogger("refusion_lit.serving").setLevel(logging.DEBUG)  # names connections that the server closes

    async def run(self, num_clients: int) -> None:
        """Send requests until the time is over."""
        async with AsyncExitStack() as stack:
            names = [*self.urls]
            options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
            clients = {
                name: await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{url}/v1", **options))
                for name, url in self.urls.items()
            }
            await asyncio.gather(*(
                self._ask(clients[name := names[number % len(names)]], self.cases[name], random.Random(number))
                for number in range(num_clients)
            ))  # fmt: skip

    async def _ask(self, client: openai.AsyncOpenAI, cases: list[Case], rng: random.Random) -> None:
        while time.monotonic() < self.until:
            case = rng.choice(cases)
            wrong = rng.choice(WRONG) if rng.random() < 0.05 else None
            begun = time.time()
            try:
                await (self._receive(client, case, rng) if wrong is None else self._refuse(client, wrong))
            except openai.RateLimitError:
                self.counts["busy"] += 1
            except openai.APIError as error:
                status = getattr(error, "status_code", None)
                is_refused = wrong is not None and status == 400
                is_late = status == 408 or "time limit" in error.message
                name = "refused" if is_refused else "timed_out" if is_late else "lost"
                lines = [record.getMessage() for record in self.log if record.created >= begun]
                sent = f"{case.kind} {case.options}" if wrong is None else wrong
                self._keep(name, f"{describe_causes(error)} after {time.time() - begun:.1f} s; {sent=}; {lines=}")
            await asyncio.sleep(rng.uniform(0, 2 * self.pause))

    async def _refuse(self, client: openai.AsyncOpenAI, wrong: dict[str, Any]) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Rome?"}], **wrong}
        await client.chat.completions.create(model="soak", **body)
        self._keep("different", f"a wrong request was answered: {wrong}")

    async def _receive(self, client: openai.AsyncOpenAI, case: Case, rng: random.Random) -> None:
        given_up_at = rng.randrange(1, 6) if rng.random() < 0.2 else None
        create: Any = {"completions": client.completions, "chat": client.chat.completions,
                       "responses": client.responses}[case.kind].create  # fmt: skip
        answer = Answer()
        num_chunks = 0
        is_whole = False
        stream = await create(model="soak", stream=True, **case.options)
        async for chunk in stream:
            is_whole = read_chunk(answer, case.kind, chunk)
            num_chunks += 1
            if num_chunks == given_up_at:
                break
        await stream.close()
        self.counts["answers" if is_whole else "given_up"] += 1
        self.counts["calls"] += len(answer.calls)
        if not is_whole and given_up_at is None:
            self._keep("lost", f"a stream without an end after {num_chunks} chunks; {case.kind} {case.options}")
        if not case.expected.begins_with(answer, is_whole=is_whole):
            self._keep("different", f"{case.kind} {case.options}: {answer} instead of {case.expected}")

    def _keep(self, name: str, example: str) -> None:
        self.counts[name] += 1
        if name in ("different", "lost") and len(self.examples) < 5:
            self.examples.append(example)


@contextmanager
def serving(model: TextModel, decoder: Decoder) -> Iterator[tuple[str, Worker]]:
    """Run a server; yield its address and its worker."""
    worker = Worker(model, decoder, SamplingParams(max_new_tokens=200), DecodingOptions(batch_size=4), LIMITS)
    service = Service(worker, "soak")
    server = Server(build_app(service), service, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not (server.started and worker.is_ready):
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", worker
    worker.drain(LIMITS.drain_seconds)
    thread.join()


def count_resources() -> dict[str, int]:
    """Return the number of the process's open files and threads."""
    return {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.2, help="mean seconds between a client's requests")
    parser.add_argument("--output", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tool_model(directory, mask=True)
        cases = {name: make_cases(model, decoder) for name, decoder in DECODERS.items()}
        servers = {name: stack.enter_context(serving(model, decoder)) for name, decoder in DECODERS.items()}
        started = time.monotonic()
        urls = {name: url for name, (url, _) in servers.items()}
        soak = Soak(urls, cases, started + options.minutes * 60, options.pause)
        resources = {"start": count_resources()}
        clients = threading.Thread(target=lambda: asyncio.run(soak.run(options.clients)))
        clients.start()
        curve: list[tuple[float, float, int]] = []
        while clients.is_alive():
            clients.join(timeout=min(60.0, options.minutes * 3))
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            minutes = (time.monotonic() - started) / 60
            curve.append((round(minutes, 2), round(resident_bytes() / 2**20, 1), soak.counts["answers"]))
            resources |= {f"minute {minutes:.0f}": count_resources()}
        time.sleep(1.0)  # for the aborts of the last streams
        resources["end"] = count_resources()
        is_idle = not any(worker.active or worker.waiting for _, worker in servers.values())
    steady = [megabytes for minutes, megabytes, _ in curve if minutes >= options.minutes / 2]
    results = {
        **soak.counts,
        "examples": soak.examples,
        "cases": {name: len(some) for name, some in cases.items()},
        "is_idle_at_the_end": is_idle,
        "megabytes_after_half_the_time": [min(steady), max(steady)],
        "resources": resources,
        "processor_minutes": round(time.process_time() / 60, 1),
        "curve": curve,
    }
    config = {"minutes": options.minutes, "clients": options.clients, "pause": options.pause,
              "load_before": load_before, "load_after": os.getloadavg()}  # fmt: skip
    write("serve_soak", config, results, output=options.output, seconds=time.monotonic() - started, seed=0)
    print({name: value for name, value in results.items() if name != "curve"})


if __name__ == "__main__":
    main()
