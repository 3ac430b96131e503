"""Time the linear layers of a 135 M model over a few tokens: torch's product and the one with packed weights.

usage: python -m benchmarks.linear [--repeats 7] [--output FILE]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from benchmarks.common import Work, interleaved, time_ratio, write

from refusion_lit.modeling.fused.linear import Linear, PackedWeights

HIDDEN, INTERMEDIATE, KEYS, NUM_LAYERS, VOCAB = 576, 1536, 192, 30, 49_152
SHAPES = [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN), (INTERMEDIATE, HIDDEN),
          (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]  # fmt: skip
"""Output and input of a block's layers, as in SmolLM2-135M."""
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def product(linears: list[Linear], num_tokens: int, dtype: torch.dtype) -> Work:
    """Return the work of sending tokens through every layer once."""
    inputs = {size: torch.randn(num_tokens, size).to(dtype) for size in (HIDDEN, INTERMEDIATE)}

    @torch.no_grad()
    def run() -> dict[str, Any]:
        for linear in linears:
            linear(inputs[linear.weight.shape[1]])
        return {"num_tokens": num_tokens}

    return Work(run)


def main() -> None:
    """Measure both types, and write milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="where to write the JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    started, types = time.perf_counter(), {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(shape).to(dtype) for shape in SHAPES * NUM_LAYERS + [(VOCAB, HIDDEN)]]
        packed = PackedWeights()
        ways = {"torch": [Linear(one) for one in weights], "packed": [Linear(one, None, packed) for one in weights]}
        rows = []
        for num_tokens in NUM_TOKENS:
            works = {way: product(linears, num_tokens, dtype) for way, linears in ways.items()}
            interleaved(works, options.repeats, clock=time.process_time if options.threads == 1 else None)
            best = {f"{way}_milliseconds": round(min(work.seconds) * 1e3, 1) for way, work in works.items()}
            rows.append({"num_tokens": num_tokens, **best, "ratio": round(time_ratio(*works.values()), 2)})
            print(dtype, rows[-1], flush=True)
        types[str(dtype).removeprefix("torch.")] = rows
    config = {"layers": NUM_LAYERS, "shapes": SHAPES, "vocab": VOCAB, "repeats": options.repeats}
    write("linear", config, types, output=options.output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    main()
