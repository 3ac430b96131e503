"""Training steps on a GPU: tokens per second and the share of its arithmetic, hybrid against next-token training.

usage: python -m benchmarks.gpu_training [--rows 8] [--tokens 2048]

A step is corruption, forward, loss, backward and AdamW under bfloat16 autocast with float32 weights, in the shape of
Qwen3-0.6B; block's rows are doubled, and it runs with the dense mask and with flex attention. Model-FLOP utilisation
counts 6 operations a weight and position, of what a large matrix product reaches on the same device.
``--model tiny --device cpu`` tries the program without a GPU; such figures mean nothing.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from benchmarks.common import Work, interleaved, now, random_model, summary_line, time_ratio, write
from benchmarks.gpu import SHAPES, Shape, check_device
from benchmarks.training import OBJECTIVES, draw_batch, make_step
from jsonargparse import auto_cli


def operations_per_second(device: str, size: int) -> float:
    """Return the operations a second of a square product in bfloat16: the best of some."""
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    best = float("inf")
    for _ in range(10):
        started = now()
        torch.mm(matrix, matrix)
        best = min(best, now() - started)
    return 2 * size**3 / best


def main(
    model: Shape = "qwen3-0.6b",
    rows: int = 8,
    tokens: int = 2048,
    repeats: int = 5,
    device: Literal["cuda", "cpu"] = "cuda",
    output: str | None = None,
) -> None:
    """Measure training steps on a GPU.

    Args:
        model: Shape of the model.
        rows: Samples of a batch.
        tokens: Tokens of a sample, half of them its prompt.
        repeats: Rounds of the interleaved timing.
        device: ``cpu`` only to try the program.
        output: Where to write the JSON.
    """
    check_device(device)
    started = time.perf_counter()
    rate = operations_per_second(device, 8192 if device == "cuda" else 512)
    backbone = random_model(SHAPES[model], device=device).train()
    batch = draw_batch(rows, tokens // 2, tokens - tokens // 2, SHAPES[model]["vocab_size"]).to(device)
    works: dict[str, Work] = {}
    for name in ("autoregressive", "hybrid", "block", "block, flex_attention"):
        implementation = "flex_attention" if "flex" in name else "sdpa"
        if implementation == "sdpa" or device == "cuda":  # flex attention has no gradients on CPUs
            step = make_step(backbone, OBJECTIVES[name.split(",")[0]], batch)
            works[name] = Work(_run(backbone, step, implementation, device))
    interleaved(works, repeats)
    num_weights = sum(parameter.numel() for parameter in backbone.parameters())
    runs: dict[str, Any] = {}
    for name, work in works.items():
        summary = work.summary()
        positions = rows * tokens * (2 if name.startswith("block") else 1)
        used = 6 * num_weights * positions / summary["median_seconds"]
        over = time_ratio(work, works["autoregressive"])
        runs[name] = {**summary, "model_flop_utilisation": used / rate, "over_autoregressive": round(over, 3)}
        print(name, summary["tokens_per_second"], f"{used / rate:.0%}", flush=True)
    config = {"model": SHAPES[model], "rows": rows, "tokens": tokens, "repeats": repeats, "device": device}
    results = {"operations_per_second": rate, "runs": runs, "summary": []}
    if device == "cuda":
        over = runs["hybrid"]["over_autoregressive"]
        results["summary"] = [summary_line(f"training step, {model}: hybrid over autoregressive", over)]
    write("gpu_training", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


def _run(backbone: Any, step: Work, implementation: str, device: str) -> Any:
    def run() -> dict[str, Any]:
        backbone.config._attn_implementation = implementation
        with torch.autocast(device, torch.bfloat16):
            return step.run()

    return run


if __name__ == "__main__":
    auto_cli(main)
