"""Our server beside ``transformers serve``: tokens per second, time to the first token and per token, texts compared.

usage: python -m benchmarks.serve --questions GSM8K_TEST.jsonl [--clients 1 4 16 64] [--num_prompts 16] [--output FILE]

All servers run at once on SmolLM2-135M-Instruct in float32, one thread each; every number of clients goes through them
in turn, so that other work on the machine meets all alike. Processor seconds of the servers are counted beside those on
the wall, and by thread: the busiest one runs the model and makes text of tokens, the others do HTTP and queue. Clients
are OpenAI's, asynchronous and streaming; tokens are those of the answers' texts. Each part is written to ``--parts`` as
it is measured, and skipped if it is there. `nox -s real_model -- fetch` fetches the model; the command
``transformers serve`` needs ``pip install 'transformers[serving]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from benchmarks.common import now, summary_line, write
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]
DRAFTER = ROOT / "experiments" / "lossless" / "drafter"
OURS = [sys.executable, "-m", "refusion_lit.cli", "serve", "--dtype", "float32", "--name", "model", "--ckpt_path"]
THEIRS = [str(Path(sys.executable).parent / "transformers"), "serve", "--dtype", "float32", "--device", "cpu"]
# The cache is bounded, as it would take 14 GB by default: 512 blocks of 32 tokens, 46 kB each, have 0.75 GB.
CONTINUOUS = [
    "--continuous-batching",
    "--cb-num-blocks",
    "512",
    "--cb-block-size",
    "32",
    "--cb-max-batch-tokens",
    "512",
]
THEIR_NAME = "transformers serve"
TIMEOUT = 900.0
"""Seconds of a request."""


@dataclass
class Running:
    """A server's process and address."""

    process: subprocess.Popen[bytes]
    url: str

    def processor_seconds(self) -> Any:
        """Return the processor time that each of its threads has taken so far."""
        counts: Any = Counter()  # its type knows counts of whole numbers only
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                fields = (thread / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
                counts[thread.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return counts


def servers(model: Path) -> dict[str, list[str]]:
    """Return the commands of the servers, without their ports."""
    command = [*OURS, str(model)]
    return {
        "Autoregressive": command,
        "SelfSpeculative": [*command, "--draft", str(DRAFTER)],
        THEIR_NAME: [*THEIRS, str(model)],
        f"{THEIR_NAME}, continuous batching": [*THEIRS, *CONTINUOUS, str(model)],
    }


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[Running]:
    """Run a server; yield it once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-500:]}")
            time.sleep(0.5)
        yield Running(process, url)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


async def asked(
    url: str, model: str, prompts: Sequence[str], num_clients: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Ask all prompts, ``num_clients`` at a time; return texts and times."""
    at_once = asyncio.Semaphore(num_clients)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:

        async def ask(prompt: str) -> dict[str, Any]:
            async with at_once, asyncio.timeout(TIMEOUT):
                started = now()
                text = ""
                first = None
                messages: Any = [{"role": "user", "content": prompt}]
                options: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "stream": True, "temperature": 0}
                stream: Any = await client.chat.completions.create(messages=messages, **options)
                async for chunk in stream:
                    piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                    first = first or (now() if piece else None)
                    text += piece
                return {"text": text, "first": (first or now()) - started, "seconds": now() - started}

        return list(await asyncio.gather(*map(ask, prompts)))


def measured(server: Running, model: str, prompts: Sequence[str], num_clients: int, max_tokens: int) -> dict[str, Any]:
    """Return a server's answers and seconds."""
    before = server.processor_seconds()
    begun = now()
    answers = asyncio.run(asked(server.url, model, prompts, num_clients, max_tokens))
    seconds = now() - begun
    taken = server.processor_seconds() - before
    return {"seconds": seconds, "processor": taken.total(), "busiest": max(taken.values()), "answers": answers}


def figures(part: Mapping[str, Any], texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Return speeds and times of one part; ``texts`` are those to compare with."""
    answers = part["answers"]
    counts = [max(len(tokenizer(row["text"], add_special_tokens=False).input_ids), 1) for row in answers]
    first = [row["first"] for row in answers]
    per_token = [
        (row["seconds"] - row["first"]) / max(count - 1, 1) for row, count in zip(answers, counts, strict=True)
    ]
    return {
        "same_text": sum(row["text"] == text for row, text in zip(answers, texts, strict=True)),
        "tokens": sum(counts),
        "tokens_per_second": round(sum(counts) / part["seconds"], 2),
        "tokens_per_processor_second": round(sum(counts) / part["processor"], 2),
        "share_of_other_threads": round(1 - part["busiest"] / part["processor"], 4),
        "first_token_seconds": {f"p{q}": round(float(np.percentile(first, q)), 3) for q in (50, 95)},
        "seconds_per_token": {f"p{q}": round(float(np.percentile(per_token, q)), 4) for q in (50, 95)},
    }


def measure(options: argparse.Namespace, prompts: Mapping[int, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Measure what ``options.parts`` lacks, and return all parts by server and number of clients."""
    path: Path = options.parts
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    parts = {(part["server"], part["clients"]): part for part in map(json.loads, lines)}

    def keep(name: str, num_clients: int, figures: Mapping[str, Any]) -> None:
        parts[name, num_clients] = {"server": name, "clients": num_clients, **figures}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(parts[name, num_clients]) + "\n")
        print(name, num_clients, figures.get("failed") or round(figures["seconds"], 1), flush=True)

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = options.model.resolve()
        started: dict[str, Running] = {}
        for name, command in servers(model).items():
            model_name = "model" if THEIR_NAME not in name else str(model)
            if (name, 0) in parts:
                continue  # it did not start, or did not answer
            with contextlib.ExitStack() as one:
                try:
                    server = one.enter_context(running(command, folder / f"{name}.log"))
                    asyncio.run(asyncio.wait_for(asked(server.url, model_name, ["Hello"], 1, 4), 120))  # warms up
                    print(name, "is ready", flush=True)
                    started[name] = server
                    stack.push(one.pop_all())
                except (RuntimeError, TimeoutError, openai.APIError) as error:
                    keep(name, 0, {"failed": f"{type(error).__name__}: {error}".replace(str(model), model.name)[:300]})
        for num_clients in options.clients:
            for name, server in started.items():
                model_name = "model" if THEIR_NAME not in name else str(model)
                if (name, num_clients) in parts:
                    continue
                try:
                    figures = measured(server, model_name, prompts[num_clients], num_clients, options.max_tokens)
                except (TimeoutError, openai.APIError) as error:
                    figures = {"failed": f"{num_clients} clients: {type(error).__name__}: {error}"[:300]}
                keep(name, num_clients, figures)
    return {f"{name}, {num} clients": part for (name, num), part in parts.items()}


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return speeds as times the other server's, and the share of the other threads."""
    row = {(row["server"], row["clients"]): row for row in rows}
    measurements = []
    for num in (1, 16):
        for name in ("Autoregressive", "SelfSpeculative"):
            if (name, num) in row and (THEIR_NAME, num) in row:
                for speed in ("tokens_per_second", "tokens_per_processor_second"):
                    ratio = row[name, num][speed] / row[THEIR_NAME, num][speed]
                    text = f"{name}: {speed}, times {THEIR_NAME}, clients: {num}"
                    measurements.append(summary_line(text, ratio))
    if ("Autoregressive", 16) in row:
        share = row["Autoregressive", 16]["share_of_other_threads"]
        measurements.append(summary_line("processor time of threads other than the engine's, 16 clients", share))
    return measurements


def main() -> None:
    """Measure all servers, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2/base"))
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--max_tokens", type=int, default=24)
    parser.add_argument("--parts", type=Path, default=Path("runs/serve/parts.jsonl"))
    parser.add_argument("--output", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = now()
    questions = [json.loads(line)["question"] for line in options.questions.read_text(encoding="utf-8").splitlines()]
    # Other prompts for each number of clients: a server that keeps prefixes would know them already.
    prompts = {}
    for num in options.clients:
        size = max(options.num_prompts, num)
        prompts[num] = questions[:size]
        del questions[:size]
    load_before = os.getloadavg()
    parts = measure(options, prompts)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = {
        num: [row["text"] for row in parts[f"Autoregressive, {num} clients"]["answers"]] for num in options.clients
    }
    rows = [
        {"server": part["server"], "clients": part["clients"], **figures(part, texts[part["clients"]], tokenizer)}
        for part in sorted(parts.values(), key=lambda part: part["clients"])
        if "failed" not in part
    ]
    failed = {part["server"]: part["failed"] for part in parts.values() if "failed" in part}
    sizes = {num: len(texts) for num, texts in prompts.items()}
    config = {"model": "SmolLM2-135M-Instruct, float32", "num_prompts": sizes, "max_tokens": options.max_tokens,
              "threads_per_server": 1, "load_before": load_before, "load_after": os.getloadavg()}  # fmt: skip
    results = {"rows": rows, "failed": failed, "summary": summarize(rows)}
    write("serve", config, results, output=options.output, seconds=now() - started, seed=0)


if __name__ == "__main__":
    main()
