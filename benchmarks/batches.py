"""Batch sizes: tokens a second of ReFusion, ``generate`` and one token a forward, from one prompt to 256 at a time.

usage: python -m benchmarks.batches [--repeats 3] [--threads 1] [--batch_sizes '[1, 16, 256]']

The small trained model of the reference outputs (setting 1) answers its prompts, repeated to fill the largest batch
twice. ReFusion decodes in each variant of its options, and once with transformers' body. Rounds are interleaved in one
process; seconds are processor time of this process if it has one thread. Rates count the answers' tokens up to their
end. Our decoders admit a prompt when another ends, ``generate`` when all of a batch have.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from benchmarks.common import (
    Work,
    golden_model,
    golden_runs,
    interleaved,
    refusion_options,
    with_library_body,
    write,
)
from benchmarks.peers import Variants, check_same_text, default_variants, library, ours
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.types import Prompt

MODEL = "clean"


def prompts_of(number: int) -> list[Prompt]:
    """Return the reference prompts, repeated under names of their own."""
    runs = [run for run in golden_runs(MODEL)["runs"] if run["setting"] == 0]
    return [Prompt(token_ids=tuple(runs[i % len(runs)]["prompt"]), id=str(i)) for i in range(number)]


def main(
    repeats: int = 3,
    threads: int = 1,
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    variants: Variants | None = None,
    output: str | None = None,
) -> None:
    """Measure.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        batch_sizes: Prompts decoded at the same time.
        variants: Options of ReFusion by name.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    variants = variants or default_variants()
    setting = golden_runs(MODEL)["settings"][0]
    model, options, num_tokens = golden_model(MODEL), refusion_options(setting), setting["gen_length"]
    cases: dict[str, dict[str, Any]] = {}
    for batch_size in batch_sizes:
        prompts = prompts_of(max(2 * batch_size, 16))
        same = {
            name: ours(model, ReFusion(**options, **more), prompts, num_tokens, batch_size)
            for name, more in variants.items()
        }
        main_variant = ReFusion(**options, **next(iter(variants.values())))
        same["transformers' body"] = ours(with_library_body(model), main_variant, prompts, num_tokens, batch_size)
        works: dict[str, Work] = {
            **same,
            "autoregressive": ours(model, Autoregressive(), prompts, num_tokens, batch_size),
            "generate": library(model, prompts, num_tokens, batch_size, ends=True),
        }
        interleaved(works, repeats, clock=time.process_time if threads == 1 else None)
        check_same_text(same)
        rates = {
            name: round(work.outcome["num_tokens"] / statistics.median(work.seconds)) for name, work in works.items()
        }
        cases[str(batch_size)] = {"tokens_per_second": rates, "runs": {n: work.summary() for n, work in works.items()}}
        print(batch_size, rates, flush=True)
    config = {
        "repeats": repeats, "threads": threads, "num_tokens": num_tokens, "refusion": options, "variants": variants,
        "model": MODEL,
    }  # fmt: skip
    write("batches", config, {"cases": cases}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
