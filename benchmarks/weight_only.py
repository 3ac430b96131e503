"""Products with weights in 8 and 4 bits, by torch's kernels, beside float32 and bfloat16: all layers of SmolLM2-135M.

usage: python -m benchmarks.weight_only [--repeats 15] [--threads 1] [--output FILE]

A work multiplies random hidden states with the matrices of a whole forward pass, layer by layer and then the head, so
that weights come from memory as they do in decoding. Attention and norms are left out. The activations of the integer
kernels are in the type in which the kernel is fast; they return the products of rounded weights, not the same products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common import Work, interleaved, time_ratio, write
from jsonargparse import auto_cli
from torch import Tensor

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs of a layer's matrices: queries, keys and values; attention's output; gate and up; down."""
NUM_LAYERS = 30
HEAD = (49_152, 576)
GROUP = 64
"""Inputs that share a scale in 4 bits; divides 576 and 1536."""
NUM_POSITIONS = (1, 4, 16)

Product = Callable[[Tensor], Tensor]


def float32(weight: Tensor) -> Product:
    """Return the product with a weight in float32."""
    return lambda states: states @ weight.T


def bfloat16(weight: Tensor) -> Product:
    """Return the product with a weight in bfloat16."""
    lowered = weight.bfloat16()
    return lambda states: states.bfloat16() @ lowered.T


def int8(weight: Tensor) -> Product:
    """Return torch's product of bfloat16 states with a weight in 8 bits, one scale per output."""
    scale = weight.abs().amax(1) / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8)
    lowered = scale.bfloat16()
    return lambda states: torch._weight_int8pack_mm(states.bfloat16(), rounded, lowered)


def int4(weight: Tensor) -> Product:
    """Return torch's product of bfloat16 states with a weight in 4 bits, a scale and a zero per group of inputs."""
    grouped = weight.unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = (high - low).clamp(min=1e-6) / 15
    rounded = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32).flatten(1)
    packed = torch._convert_weight_to_int4pack_for_cpu(rounded, 1)
    zeros = low + 8 * scale  # the kernel computes (value - 8) * scale + zero
    scales = torch.stack((scale, zeros), -1).transpose(0, 1).contiguous().bfloat16()
    return lambda states: torch._weight_int4pack_mm_for_cpu(states.bfloat16(), packed, GROUP, scales)


KINDS = {"float32": float32, "bfloat16": bfloat16, "int8": int8, "int4": int4}


def forward_pass(kind: Callable[[Tensor], Product]) -> Callable[[int], dict[str, Any]]:
    """Return a function that makes all products of a forward pass over a number of positions."""
    generator = torch.Generator().manual_seed(0)
    shapes = [*SHAPES * NUM_LAYERS, HEAD]
    products = [kind(torch.randn(shape, generator=generator) / shape[1] ** 0.5) for shape in shapes]

    def run(num_positions: int) -> dict[str, Any]:
        states = {inputs: torch.ones(num_positions, inputs) for inputs in {inputs for _, inputs in shapes}}
        for (_, inputs), product in zip(shapes, products, strict=True):
            product(states[inputs])
        return {"positions": num_positions}

    return run


def main(repeats: int = 15, threads: int = 1, output: str | None = None) -> None:
    """Time the products.

    Args:
        repeats: Rounds; every round runs all kinds in a new order.
        threads: Number of CPU threads.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    rows = []
    with torch.inference_mode():
        passes = {name: forward_pass(kind) for name, kind in KINDS.items()}
        for number in NUM_POSITIONS:
            works = {name: Work(lambda run=run, number=number: run(number)) for name, run in passes.items()}
            interleaved(works, repeats)
            for name, work in works.items():
                row = {
                    "weights": name,
                    "positions": number,
                    "milliseconds": round(work.summary()["median_seconds"] * 1e3, 2),
                }
                rows.append({**row, "speed_over_float32": round(time_ratio(works["float32"], work), 3)})
                print(rows[-1], flush=True)
    config = {"model": "matrices of SmolLM2-135M", "group": GROUP, "repeats": repeats, "threads": threads}
    write("weight_only", config, {"times": rows}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
