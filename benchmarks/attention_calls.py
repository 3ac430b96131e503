"""Attention on CPUs in several calls: does it pay against one padded call?

usage: python -m benchmarks.attention_calls [--repeats 5] [--output FILE]

Two ways, in turn in one process with one thread: one padded call per layer for all rows, and calls of their own for
long spans with one for all others (`segments`, what decoding uses). Random weights, prompts of random tokens; greedy.
Times are of this process; a ratio is the median over rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.common import SMALL, Work, decoded, interleaved, random_model, random_prompts, time_ratio, write
from benchmarks.shared_prefixes import prompts_of
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.modeling.fused import segments
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152,
}  # fmt: skip
"""The shape of SmolLM2-135M."""
MODELS = {"small": SMALL, "SmolLM2's shape": SMOLLM2}
DECODERS: dict[str, Decoder] = {"autoregressive": Autoregressive(), "refusion": ReFusion(num_serial_blocks=1)}
WAYS = ("segments", "one call")


@contextmanager
def attending(way: str) -> Iterator[None]:
    """Let attention on CPUs run in one of the two ways."""
    before = segments._MIN_CALLS
    if way == "one call":
        segments._MIN_CALLS = 1 << 60
    try:
        yield
    finally:
        segments._MIN_CALLS = before


def mixed_prompts(number: int, shortest: int, longest: int) -> list[Prompt]:
    """Return prompts of many lengths, each as likely by its logarithm."""
    rng = random.Random(0)
    lengths = [round(shortest * (longest / shortest) ** rng.random()) for _ in range(number)]
    return [Prompt(token_ids=random_prompts(1, n, seed=i)[0].token_ids, id=str(i)) for i, n in enumerate(lengths)]


CASES: dict[str, tuple[str, Callable[[], list[Prompt]], int, int]] = {
    "prompts of 60 to 1200 tokens": ("small", lambda: mixed_prompts(32, 60, 1200), 16, 64),
    "prompts of 60 to 200 tokens": ("small", lambda: mixed_prompts(64, 60, 200), 16, 64),
    "prompts of 20 to 40 tokens": ("small", lambda: mixed_prompts(64, 20, 40), 16, 64),
    "1024 tokens in common": ("small", lambda: prompts_of(64, 1024, 16), 64, 32),
    "one prompt of 4096 tokens": ("small", lambda: random_prompts(1, 4096), 1, 64),
    "questions of 60 to 200 tokens": ("SmolLM2's shape", lambda: mixed_prompts(8, 60, 200), 8, 32),
    "one prompt of 1024 tokens": ("SmolLM2's shape", lambda: random_prompts(1, 1024), 1, 32),
}
"""Model, prompts, batch size and new tokens."""


def work_of(
    way: str, model: LanguageModel, decoder: Decoder, prompts: Sequence[Prompt], num_tokens: int, batch_size: int
) -> Work:
    """Return the work of decoding the prompts in one way."""

    def run() -> dict[str, Any]:
        with attending(way):
            output = decoded(model, decoder, prompts, num_tokens, batch_size)
        return {"num_tokens": sum(row.num_tokens for row in output.rows), "num_calls": output.num_calls}

    return Work(run)


def main(repeats: int = 5, threads: int = 1, output: str | None = None) -> None:
    """Measure.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started, cases = time.perf_counter(), {}
    models = {name: random_model(options) for name, options in MODELS.items()}
    for name, (model, make, batch_size, num_tokens) in CASES.items():
        for label, decoder in DECODERS.items():
            works = {w: work_of(w, models[model], decoder, make(), num_tokens, batch_size) for w in WAYS}
            interleaved(works, repeats, clock=time.process_time)
            found: dict[str, Any] = {way: work.summary() for way, work in works.items()}
            ratio = round(time_ratio(works["one call"], works["segments"]), 3)
            case = f"{model}: {name}, batch {batch_size}, {label}"
            cases[case] = {"over one call": ratio, "runs": found}
            print(case, ratio, flush=True)
    config = {"repeats": repeats, "threads": threads, "models": MODELS}
    write("attention_calls", config, {"cases": cases}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
