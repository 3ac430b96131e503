"""What 16 bits cost or save on a CPU: a training step in mixed precision, and decoding in bfloat16, over float32.

usage: python -m benchmarks.precision [--repeats 5] [--threads 1]

A processor without instructions for bfloat16 multiplies it slowly: `fit` then warns of `bf16-mixed`, and decoding
takes float32 by default (`decoding_dtype`).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from benchmarks.common import VOCABULARY_HEAVY, Work, decoded, interleaved, random_model, time_ratio, write
from benchmarks.training import draw_batch, make_step
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.load import decoding_dtype
from refusion_lit.objectives import Hybrid
from refusion_lit.types import Prompt

MODEL: dict[str, Any] = {**VOCABULARY_HEAVY, "vocab_size": 8192}
SHAPE, NUM_TOKENS = (2, 32, 96), 16
BATCH_SIZES = (1, 16)


def mixed_step(model: Backbone, *, is_mixed: bool) -> Work:
    """Return the work of a training step, with products in bfloat16 if ``is_mixed``."""
    step = make_step(model, Hybrid(), draw_batch(*SHAPE, MODEL["vocab_size"]))

    def run() -> dict[str, Any]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            return step.run()

    return Work(run)


def decode_work(model: Backbone, batch_size: int) -> Work:
    """Return the work of decoding a batch from left to right."""
    prompts = [Prompt(token_ids=tuple(range(3 + i, 19 + i)), id=str(i)) for i in range(batch_size)]

    def run() -> dict[str, Any]:
        rows = decoded(model, Autoregressive(), prompts, NUM_TOKENS, batch_size).rows
        return {"num_tokens": sum(row.num_tokens for row in rows)}

    return Work(run)


def main(repeats: int = 5, threads: int = 1, output: str | None = None) -> None:
    """Measure both types in turns.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    models = {dtype: random_model(MODEL, dtype=getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    trained = models["float32"]
    cases = {
        "training step": {
            "float32": mixed_step(trained, is_mixed=False),
            "bfloat16": mixed_step(trained, is_mixed=True),
        }
    }
    for size in BATCH_SIZES:
        cases[f"decoding, batches of {size}"] = {dtype: decode_work(model, size) for dtype, model in models.items()}
    figures = {}
    for name, works in cases.items():
        interleaved(works, repeats, clock=time.process_time)
        ratio = round(time_ratio(works["bfloat16"], works["float32"]), 3)
        figures[name] = {"runs": {dtype: work.summary() for dtype, work in works.items()}, "over_float32": ratio}
        print(name, ratio, flush=True)
    config = {
        "repeats": repeats,
        "threads": threads,
        "shape": SHAPE,
        "num_tokens": NUM_TOKENS,
        "model": MODEL,
    }
    results = {"has_instructions": decoding_dtype({"dtype": "bfloat16"}, "cpu") == "bfloat16", "cases": figures}
    write("precision", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
