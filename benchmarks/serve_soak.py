"""Soak test of the server: 16 clients with random requests and aborts; memory must settle, and no answer may differ.

usage: python -m benchmarks.serve_soak [--minutes 30] [--clients 16] [--pause 0.2] [--output FILE]

One process holds the server on a tiny model, and OpenAI's asynchronous clients. Requests are drawn from a set whose
answers were decoded alone, without a server; one in five is given up in mid-stream. The model is kept from ending its
answers, so that they have 5, 60 or 200 tokens. Clients pause between requests, so that the processor has time for other
work. Resident memory is read every minute, after ``malloc_trim``; the first half of the time is warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import random
import threading
import time
from typing import Any

import openai
import torch
from benchmarks.common import GOLDENS, resident_bytes, write

import refusion_lit
from refusion_lit.serving import Limits
from refusion_lit.serving.app import Server, build_app
from refusion_lit.serving.service import Service
from refusion_lit.serving.worker import Worker
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams

PROMPTS = ("1+1", "12+30=", "7+8=15;", "99+1", "3,4", "12+34,56+78>")
REQUESTS = [
    (prompt, SamplingParams(max_new_tokens=length, temperature=temperature, seed=seed))
    for seed, prompt in enumerate(PROMPTS)
    for length in (5, 60, 200)
    for temperature in (0.0, 1.0)
]


def without_ends(model: refusion_lit.TextModel) -> refusion_lit.TextModel:
    """Return a model that ends no answer, so that each is as long as its limit."""
    head = model.backbone.head_runner()
    ends = torch.tensor(model.backbone.special_tokens.eos_token_ids)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return head(hidden).index_fill_(-1, ends, -torch.inf)

    model.backbone.logits = logits  # type: ignore[method-assign]
    model.backbone.head_runner = lambda: logits  # type: ignore[method-assign]
    return model


class Soak:
    """Clients and what they have counted."""

    def __init__(self, url: str, expected: list[str], until: float, pause: float) -> None:
        self.url = url
        self.expected = expected
        self.until = until
        self.pause = pause
        self.counts = {"answers": 0, "given_up": 0, "different": 0, "lost": 0}

    async def run(self, num_clients: int) -> None:
        """Ask until the time is over."""
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            await asyncio.gather(*(self._ask(client, random.Random(number)) for number in range(num_clients)))

    async def _ask(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        while time.monotonic() < self.until:
            number = rng.randrange(len(REQUESTS))
            prompt, sampling = REQUESTS[number]
            options: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
            given_up_at = rng.randrange(1, 4) if rng.random() < 0.2 else None
            text = ""
            try:
                stream: Any = await client.completions.create(
                    model="soak", prompt=prompt, seed=sampling.seed, stream=True, **options
                )
                num_pieces = 0
                async for chunk in stream:
                    text += chunk.choices[0].text
                    num_pieces += 1
                    if num_pieces == given_up_at:
                        break
                await stream.close()
                is_whole = given_up_at is None or num_pieces < given_up_at
                is_right = text == self.expected[number] if is_whole else self.expected[number].startswith(text)
                self.counts["answers" if is_whole else "given_up"] += 1
                self.counts["different"] += not is_right
            except openai.APIError:
                self.counts["lost"] += 1
            await asyncio.sleep(rng.uniform(0, 2 * self.pause))


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
    directory = GOLDENS / "models" / "additions-clean"
    model = without_ends(refusion_lit.load(directory, device="cpu"))
    decoder = model.default_decoder
    expected = []
    lengths = []
    for prompt, sampling in REQUESTS:
        one = Prompt(token_ids=tuple(model.encode(prompt)), id="0")
        [row] = model.decode([one], decoder, sampling).rows
        expected.append(row.text)
        lengths.append(row.num_tokens)
    worker = Worker(model, decoder, SamplingParams(max_new_tokens=200), DecodingOptions(batch_size=8), Limits())
    service = Service(worker, "soak")
    server = Server(build_app(service), service, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not (server.started and worker.is_ready):
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    started = time.monotonic()
    soak = Soak(f"http://127.0.0.1:{port}", expected, started + options.minutes * 60, options.pause)
    clients = threading.Thread(target=lambda: asyncio.run(soak.run(options.clients)))
    clients.start()
    curve: list[tuple[float, float, int]] = []
    while clients.is_alive():
        clients.join(timeout=min(60.0, options.minutes * 3))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        minutes = (time.monotonic() - started) / 60
        curve.append((round(minutes, 2), round(resident_bytes() / 2**20, 1), soak.counts["answers"]))
    is_idle = not (worker.active or worker.waiting)
    worker.drain(worker.limits.drain_seconds)
    thread.join()
    steady = [megabytes for minutes, megabytes, _ in curve if minutes >= options.minutes / 2]
    results = {
        **soak.counts,
        "tokens_of_an_answer_alone": [min(lengths), max(lengths)],
        "is_idle_at_the_end": is_idle,
        "megabytes_after_half_the_time": [min(steady), max(steady)],
        "processor_minutes": round(time.process_time() / 60, 1),
        "curve": curve,
    }
    config = {"model": directory.name, "minutes": options.minutes, "clients": options.clients, "pause": options.pause,
              "load_before": load_before, "load_after": os.getloadavg()}  # fmt: skip
    write("serve_soak", config, results, output=options.output, seconds=time.monotonic() - started, seed=0)
    print({name: value for name, value in results.items() if name != "curve"})


if __name__ == "__main__":
    main()
