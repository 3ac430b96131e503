"""Bare forwards: what a batch of 16 can gain at most, by the length of a forward and the body.

usage: python -m benchmarks.forwards [--repeats 60] [--threads '[1, 2]']

Times one row and 16 rows of additions-clean over a cache of 100 entries, with transformers' body and the fused one. The
ratio is the speed of 16 rows over the speed of one row, in positions per second: no decoder can gain more from a batch.
"""

from __future__ import annotations

import time
from itertools import product

import torch
from benchmarks.common import golden_model, write
from jsonargparse import auto_cli

NUM_KEYS = 100
BODIES = {"transformers' body": False, "the fused body": True}


def seconds(rows: int, length: int, *, fused: bool, repeats: int) -> float:
    """Return the shortest time of a forward of ``rows`` rows with ``length`` positions each."""
    model = golden_model("clean")
    model.fused_body = fused
    cache = model.make_cache(rows)
    ids = torch.randint(3, 30, (rows, length))
    positions = (torch.arange(length) + NUM_KEYS - length).expand(rows, length)
    mask = torch.ones(rows, length, NUM_KEYS, dtype=torch.bool)
    row_index = torch.arange(rows).repeat_interleave(length)
    cache_index = torch.arange(NUM_KEYS - length, NUM_KEYS).repeat(rows)
    taken = []
    with torch.no_grad():
        for _ in range(repeats):
            cache.prepare(list(range(rows)), NUM_KEYS, None, row_index, cache_index)
            started = time.perf_counter()
            model.hidden_states(ids, positions, mask, cache)
            taken.append(time.perf_counter() - started)
    return min(taken)


def main(repeats: int = 60, threads: tuple[int, ...] = (1, 2), output: str | None = None) -> None:
    """Measure bare forwards.

    Args:
        repeats: Forwards of each kind; the fastest counts.
        threads: Numbers of torch's threads, one after the other.
        output: Where to write the JSON.
    """
    torch.manual_seed(0)
    started = time.perf_counter()
    cases = []
    for number, (body, fused), length in product(threads, BODIES.items(), (1, 16, 38, 64)):
        torch.set_num_threads(number)
        one, many = (seconds(rows, length, fused=fused, repeats=repeats) for rows in (1, 16))
        cases.append(
            {
                "threads": number,
                "body": body,
                "positions_a_row": length,
                "milliseconds_1_row": round(1e3 * one, 3),
                "milliseconds_16_rows": round(1e3 * many, 3),
                "ratio": round(16 * one / many, 2),
            }
        )
    config = {"repeats": repeats, "threads": threads, "num_keys": NUM_KEYS}
    write("forwards", config, {"cases": cases}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
