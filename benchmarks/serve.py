"""Our server beside ``transformers serve``: tokens per second, time to the first token and per token, texts compared.

usage: python -m benchmarks.serve --questions GSM8K_TEST.jsonl [--clients 1 4 16] [--num_prompts 32] [--output FILE]

All servers run at once on SmolLM2-135M-Instruct in float32, one thread each; every number of clients goes through them
in turn, so that other work on the machine meets all alike. Clients are OpenAI's, asynchronous and streaming; tokens are
those of the answers' texts. `nox -s real_model -- fetch` fetches the model; ``transformers serve`` needs
``pip install 'transformers[serving]'``.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
from benchmarks.common import aim, now, write
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]
DRAFTER = ROOT / "experiments" / "lossless" / "drafter"
OURS = [sys.executable, "-m", "refusion_lit.cli", "serve", "--dtype", "float32", "--name", "model", "--ckpt_path"]
THEIRS = [str(Path(sys.executable).parent / "transformers"), "serve", "--dtype", "float32", "--device", "cpu"]


def servers(model: Path) -> dict[str, list[str]]:
    """Return the commands of the servers, without their ports."""
    own = [*OURS, str(model)]
    return {
        "Autoregressive": own,
        "SelfSpeculative": [*own, "--draft", str(DRAFTER)],
        "transformers serve": [*THEIRS, str(model)],
        "transformers serve, continuous batching": [*THEIRS, "--continuous-batching", str(model)],
    }


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[str]:
    """Run a server; yield its address once it answers."""
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
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


async def asked(
    url: str, model: str, prompts: Sequence[str], num_clients: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Ask all prompts, so many at a time; return texts and times."""
    at_once = asyncio.Semaphore(num_clients)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def ask(prompt: str) -> dict[str, Any]:
            async with at_once:
                started, text, first = now(), "", None
                messages = [{"role": "user", "content": prompt}]
                options = {"model": model, "max_tokens": max_tokens, "stream": True}
                stream: Any = await client.chat.completions.create(messages=messages, **options)
                async for chunk in stream:
                    piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                    first = first or (now() if piece else None)
                    text += piece
                return {"text": text, "first": (first or now()) - started, "seconds": now() - started}

        return list(await asyncio.gather(*map(ask, prompts)))


def figures(answers: Sequence[Mapping[str, Any]], seconds: float, tokenizer: Any) -> dict[str, Any]:
    """Return speeds and times of one server and number of clients."""
    counts = [max(len(tokenizer(row["text"], add_special_tokens=False).input_ids), 1) for row in answers]
    first = [row["first"] for row in answers]
    per_token = [
        (row["seconds"] - row["first"]) / max(count - 1, 1) for row, count in zip(answers, counts, strict=True)
    ]
    return {
        "tokens": sum(counts),
        "tokens_per_second": round(sum(counts) / seconds, 2),
        "first_token_seconds": {f"p{q}": round(float(np.percentile(first, q)), 3) for q in (50, 95)},
        "seconds_per_token": {f"p{q}": round(float(np.percentile(per_token, q)), 4) for q in (50, 95)},
    }


def main() -> None:
    """Measure all servers, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2/base"))
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--output", default=None)
    options = parser.parse_args()
    started = now()
    lines = options.questions.read_text(encoding="utf-8").splitlines()[: options.num_prompts]
    prompts = [json.loads(line)["question"] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    texts: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {}
        for name, command in servers(options.model.resolve()).items():
            try:
                urls[name] = stack.enter_context(running(command, folder / f"{name}.log"))
                model = "model" if "serve" not in name else str(options.model.resolve())
                asyncio.run(asked(urls[name], model, prompts[:1], 1, 4))  # warms up
            except (RuntimeError, openai.APIError) as error:
                urls.pop(name, None)
                failed[name] = str(error)[-300:]
        for num_clients in options.clients:
            for name, url in urls.items():
                model = "model" if "serve" not in name else str(options.model.resolve())
                begun = now()
                answers = asyncio.run(asked(url, model, prompts, num_clients, options.max_tokens))
                found = figures(answers, now() - begun, tokenizer)
                texts.setdefault(name, [row["text"] for row in answers])
                same = sum(row["text"] == own for row, own in zip(answers, texts["Autoregressive"], strict=True))
                rows.append({"server": name, "clients": num_clients, "same_text": same, **found})
                print(rows[-1], flush=True)
    speed = {(row["server"], row["clients"]): row["tokens_per_second"] for row in rows}
    theirs = "transformers serve"
    aims = [
        aim(f"{name}: tokens/s, times transformers serve, {num} clients", speed[name, num] / speed[theirs, num], bound,
            at_least=True)
        for num, bound in ((1, 1.5), (16, 1.2)) for name in ("Autoregressive", "SelfSpeculative")
        if (name, num) in speed and (theirs, num) in speed
    ]  # fmt: skip
    config = {"model": "SmolLM2-135M-Instruct, float32", "num_prompts": len(prompts), "max_tokens": options.max_tokens,
              "threads_per_server": 1, "load_before": load_before, "load_after": os.getloadavg()}  # fmt: skip
    results = {"rows": rows, "failed": failed, "aims": aims}
    write("serve", config, results, output=options.output, seconds=now() - started, seed=0)


if __name__ == "__main__":
    main()
