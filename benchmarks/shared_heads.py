"""Time the fused backbone's bfloat16 attention on CPUs where heads share keys: each head alone, and as one head.

usage: python -m benchmarks.shared_heads [--repeats 15] [--output FILE]
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.common import Work, interleaved, time_ratio, write

from refusion_lit.modeling.fused import rows
from refusion_lit.modeling.fused.rows import attend_rows

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen3-0.6B": (16, 8, 128)}
"""Query heads, key/value heads and their size."""
NUM_KEYS = 256
CALLS = 20


def attention(shape: tuple[int, int, int], batch_size: int, num_queries: int, most: int) -> Work:
    """Return the work of ``CALLS`` attention calls in which at most ``most`` queries share a head."""
    num_heads, num_key_heads, size = shape
    query = torch.randn(batch_size, num_queries, num_heads, size).bfloat16()
    key, value = (torch.randn(batch_size, NUM_KEYS, num_key_heads, size).bfloat16() for _ in range(2))
    mask = torch.zeros(batch_size, 1, num_queries, NUM_KEYS, dtype=torch.bfloat16)

    @torch.no_grad()
    def run() -> dict[str, Any]:
        with patch.object(rows, "_MOST_SHARING", most):
            for _ in range(CALLS):
                attend_rows(query, key, value, mask)
        return {"num_calls": CALLS}

    return Work(run)


def main() -> None:
    """Measure, and write milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", help="where to write the JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started, cases = time.perf_counter(), []
    for (name, shape), batch_size, num_queries in product(SHAPES.items(), (1, 16, 48), (1, 4, 8)):
        works = {
            "apart": attention(shape, batch_size, num_queries, 0),
            "together": attention(shape, batch_size, num_queries, rows._MOST_SHARING),
        }
        interleaved(works, options.repeats, clock=time.process_time)
        best = {f"{way}_milliseconds": round(min(w.seconds) / CALLS * 1e3, 3) for way, w in works.items()}
        case = {"shape": name, "batch_size": batch_size, "num_queries": num_queries, **best}
        cases.append({**case, "ratio": round(time_ratio(*works.values()), 2)})
        print(cases[-1], flush=True)
    config = {"shapes": SHAPES, "num_keys": NUM_KEYS, "calls": CALLS, "repeats": options.repeats}
    write(
        "shared_heads", config, {"cases": cases}, output=options.output, seconds=time.perf_counter() - started, seed=0
    )


if __name__ == "__main__":
    main()
