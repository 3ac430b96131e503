"""Kernels of the fused body on CPUs, each beside torch's own: linear layers with packed weights, and shared heads.

usage: python -m benchmarks.kernels [--parts '[linear, shared_heads]'] [--repeats 9] [--threads 1]

``linear``: all linear layers of a 135 M model over a few tokens: all alone (``packed``), and layers with the same
input as one product (``joint``), as in the fused body. ``shared_heads``: bfloat16 attention where query heads share
keys, each head alone and as queries of one head. Each part writes a result of its own.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any, Literal
from unittest.mock import patch

import torch
from benchmarks.common import RESULTS, Work, interleaved, time_ratio, write
from jsonargparse import auto_cli

from refusion_lit.modeling.fused import attention as fused_attention
from refusion_lit.modeling.fused.attention import attend_rows
from refusion_lit.modeling.fused.linear import Linear, PackedWeights

Part = Literal["linear", "shared_heads"]

HIDDEN, INTERMEDIATE, KEYS, NUM_LAYERS, VOCAB = 576, 1536, 192, 30, 49_152
GROUPS = [
    [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN)],
    [(HIDDEN, HIDDEN)],
    [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN)],
    [(HIDDEN, INTERMEDIATE)],
]
"""Output and input of a block's layers, as in SmolLM2-135M; the layers of a group have the same input."""
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

HEADS = {"SmolLM2-135M": (9, 3, 64), "Qwen3-0.6B": (16, 8, 128)}
"""Query heads, key/value heads and their size."""
NUM_KEYS = 256
CALLS = 20


def through_layers(linears: list[Linear], num_tokens: int, dtype: torch.dtype) -> Work:
    """Return the work of sending tokens through every layer once."""
    inputs = {size: torch.randn(num_tokens, size).to(dtype) for size in (HIDDEN, INTERMEDIATE)}

    @torch.no_grad()
    def run() -> dict[str, Any]:
        for linear in linears:
            linear(inputs[linear.weights[0].shape[1]])
        return {"num_tokens": num_tokens}

    return Work(run)


def linear(repeats: int, threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config and milliseconds of both types."""
    types = {}
    for dtype in (torch.float32, torch.bfloat16):
        groups = [
            [torch.randn(shape).to(dtype) for shape in group] for group in [*GROUPS * NUM_LAYERS, [(VOCAB, HIDDEN)]]
        ]
        weights = [[one] for group in groups for one in group]
        ways = {
            "torch": [Linear(one) for one in weights],
            "packed": [Linear(one, packed=PackedWeights()) for one in weights],
            "joint": [Linear(group, packed=PackedWeights()) for group in groups],
        }
        cases = []
        for num_tokens in NUM_TOKENS:
            works = {way: through_layers(linears, num_tokens, dtype) for way, linears in ways.items()}
            interleaved(works, repeats, clock=time.process_time if threads == 1 else None)
            best = {f"{way}_milliseconds": round(min(work.seconds) * 1e3, 1) for way, work in works.items()}
            ratios = {
                "ratio": round(time_ratio(works["torch"], works["packed"]), 2),
                "joint_ratio": round(time_ratio(works["packed"], works["joint"]), 2),
            }
            cases.append({"num_tokens": num_tokens, **best, **ratios})
            print(dtype, cases[-1], flush=True)
        types[str(dtype).removeprefix("torch.")] = cases
    return {"layers": NUM_LAYERS, "shapes": GROUPS, "vocab": VOCAB}, types


def attention(shape: tuple[int, int, int], batch_size: int, num_queries: int, most: int) -> Work:
    """Return the work of ``CALLS`` attention calls in which at most ``most`` queries share a head."""
    num_heads, num_key_heads, size = shape
    query = torch.randn(batch_size, num_queries, num_heads, size).bfloat16()
    key, value = (torch.randn(batch_size, NUM_KEYS, num_key_heads, size).bfloat16() for _ in range(2))
    mask = torch.zeros(batch_size, 1, num_queries, NUM_KEYS, dtype=torch.bfloat16)

    @torch.no_grad()
    def run() -> dict[str, Any]:
        with patch.object(fused_attention, "_MOST_SHARING", most):
            for _ in range(CALLS):
                attend_rows(query, key, value, mask)
        return {"num_calls": CALLS}

    return Work(run)


def shared_heads(repeats: int, threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config and milliseconds of all shapes."""
    cases = []
    for (name, shape), batch_size, num_queries in product(HEADS.items(), (1, 16, 48), (1, 4, 8)):
        works = {
            "apart": attention(shape, batch_size, num_queries, 0),
            "together": attention(shape, batch_size, num_queries, fused_attention._MOST_SHARING),
        }
        interleaved(works, repeats, clock=time.process_time if threads == 1 else None)
        best = {f"{way}_milliseconds": round(min(w.seconds) / CALLS * 1e3, 3) for way, w in works.items()}
        case = {"shape": name, "batch_size": batch_size, "num_queries": num_queries, **best}
        cases.append({**case, "ratio": round(time_ratio(*works.values()), 2)})
        print(cases[-1], flush=True)
    return {"shapes": HEADS, "num_keys": NUM_KEYS, "calls": CALLS}, {"cases": cases}


def main(
    parts: tuple[Part, ...] = ("linear", "shared_heads"),
    repeats: int = 9,
    threads: int = 1,
    directory: str = str(RESULTS),
) -> None:
    """Measure kernels.

    Args:
        parts: What to measure.
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        directory: Where to write the JSON of each part.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    for part in parts:
        started = time.perf_counter()
        config, results = {"linear": linear, "shared_heads": shared_heads}[part](repeats, threads)
        config |= {"repeats": repeats, "threads": threads}
        output = f"{directory}/{part}.json"
        write(part, config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
