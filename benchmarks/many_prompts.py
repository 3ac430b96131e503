"""Many prompts of mixed lengths within bounded memory: the bound on the cache is what keeps a test from running out.

usage: python -m benchmarks.many_prompts [--num_prompts 10000]

10 000 prompts of 16 to 2048 tokens (as many short as long ones, on a logarithmic scale) get 8 new tokens each from
ReFusion on the small model with random weights, 64 at a time, in one call. Each case runs in a process of its own: with
bounds on the cache and on the positions of a forward, without them, and, to see that the difference matters, both with
no more memory than halfway between the two (``RLIMIT_DATA``). Memory is the highest resident memory over that before
the call (Linux only).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import resource
import time
from functools import partial
from typing import Any

import torch
from benchmarks.common import (
    SMALL,
    alone,
    decoded,
    peak_resident_bytes,
    random_model,
    resident_bytes,
    status_bytes,
    summary_line,
    write,
)
from jsonargparse import auto_cli

from refusion_lit.decoding import ReFusion
from refusion_lit.types import Prompt

SHORTEST, LONGEST, NUM_TOKENS, BATCH_SIZE = 16, 2048, 8, 64
BOUNDS = {"max_cache_tokens": 16_384, "max_tokens_per_forward": 4096}


def mixed_prompts(number: int, *, seed: int = 0) -> list[Prompt]:
    """Draw prompts of random tokens whose lengths are uniform on a logarithmic scale."""
    rng = random.Random(seed)
    lengths = [round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))) for _ in range(number)]
    return [
        Prompt(token_ids=tuple(rng.choices(range(3, 128), k=length)), id=str(i)) for i, length in enumerate(lengths)
    ]


def run(num_prompts: int, *, bounded: bool, megabytes: float | None = None) -> dict[str, Any]:
    """Decode the prompts in this process.

    Args:
        num_prompts: Number of prompts.
        bounded: Whether ``BOUNDS`` hold.
        megabytes: What the process may take over what it has before the call; ``None``: anything.
    """
    torch.set_num_threads(1)
    model, prompts = random_model(SMALL), mixed_prompts(num_prompts)
    decoder = ReFusion(num_serial_blocks=1)
    decoded(model, decoder, prompts[:1], NUM_TOKENS)  # loads kernels
    before = resident_bytes()
    if megabytes is not None:
        limit = status_bytes("VmData") + int(megabytes * 2**20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    started = time.process_time()
    try:
        output = decoded(model, decoder, prompts, NUM_TOKENS, BATCH_SIZE, **(BOUNDS if bounded else {}))
    except ValueError as error:
        return {"ended_with": str(error)}
    digest = hashlib.sha256(json.dumps([row.token_ids for row in output.rows]).encode()).hexdigest()[:16]
    return {
        "num_answers": len(output.rows),
        "processor_seconds": round(time.process_time() - started, 1),
        "cache_megabytes": round(output.cache_bytes / 2**20, 1),
        "extra_megabytes": round((peak_resident_bytes() - before) / 2**20, 1),
        "text": digest,
    }


def main(num_prompts: int = 10_000, output: str | None = None) -> None:
    """Measure.

    Args:
        num_prompts: Number of prompts.
        output: Where to write the JSON.
    """
    started = time.perf_counter()
    case = partial(alone, "many_prompts", "run", num_prompts=num_prompts)
    cases = {name: case(bounded=name == "bounded") for name in ("bounded", "unbounded")}
    limit = round((cases["bounded"]["extra_megabytes"] + cases["unbounded"]["extra_megabytes"]) / 2)
    for name in ("bounded", "unbounded"):
        cases[f"{name}, {limit} MB at most"] = case(bounded=name == "bounded", megabytes=limit)
    for name, figures in cases.items():
        print(name, figures, flush=True)
    answered = cases[f"bounded, {limit} MB at most"].get("num_answers", 0)
    same = cases["bounded"]["text"] == cases["unbounded"]["text"]
    config = {
        "num_prompts": num_prompts, "lengths": [SHORTEST, LONGEST], "num_tokens": NUM_TOKENS,
        "batch_size": BATCH_SIZE, "bounds": BOUNDS, "model": SMALL,
    }  # fmt: skip
    summary = [summary_line(f"prompts of mixed lengths answered within {limit} MB", answered)]
    write("many_prompts", config, {"cases": cases, "same_text": same, "summary": summary}, output=output,
          seconds=time.perf_counter() - started, seed=0)  # fmt: skip


if __name__ == "__main__":
    auto_cli(main)
