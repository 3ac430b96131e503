"""Prompts that begin alike: prompts per second with the common part computed once, and with each prompt on its own.

usage: python -m benchmarks.shared_prefixes [--repeats 3]

64 prompts of a common beginning of 1 024 tokens (a few-shot prompt) and 16 tokens of their own, 32 new tokens each, on
the small model with one thread, batch 64 and batch 1. Rounds are interleaved in one process; a ratio is the median over
rounds of the processor time of this process.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from benchmarks.common import (
    SMALL,
    Work,
    decoded,
    interleaved,
    random_model,
    random_prompts,
    summary_line,
    time_ratio,
    write,
)
from benchmarks.replay import ALL_ACCEPTED, Replay, ReplayedModel
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt


def make_prompts(number: int, common: int, num_own: int) -> list[Prompt]:
    """Return prompts that have their first tokens in common."""
    beginning = random_prompts(1, common, seed=1)[0].token_ids
    return [Prompt(token_ids=(*beginning, *p.token_ids), id=p.id) for p in random_prompts(number, num_own)]


def make_work(
    model: LanguageModel, decoder: Decoder, prompts: list[Prompt], batch_size: int, num_tokens: int, *, share: bool
) -> Work:
    """Return the work of decoding the prompts."""

    def run() -> dict[str, Any]:
        output = decoded(model, decoder, prompts, num_tokens, batch_size, share_prefixes=share)
        tokens = sum(row.num_tokens for row in output.rows)
        text = hash(tuple(tuple(row.token_ids) for row in output.rows))
        return {"num_tokens": tokens, "num_shared": output.num_shared, "num_calls": output.num_calls, "text": text}

    return Work(run)


def main(
    repeats: int = 3,
    threads: int = 1,
    num_prompts: int = 64,
    common: int = 1024,
    num_tokens: int = 32,
    batch_sizes: tuple[int, ...] = (64, 1),
    output: str | None = None,
) -> None:
    """Measure.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        num_prompts: Number of prompts.
        common: Tokens that they begin with.
        num_tokens: New tokens.
        batch_sizes: Prompts decoded at the same time.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    model, prompts = random_model(SMALL), make_prompts(num_prompts, common, 16)
    replay = ReplayedModel(model, Replay(ALL_ACCEPTED, len(prompts[0].token_ids), SMALL["vocab_size"] - 1))
    variants: dict[str, tuple[LanguageModel, Decoder]] = {
        "refusion": (replay, ReFusion(num_serial_blocks=1)),
        "autoregressive": (model, Autoregressive()),
    }
    cases: dict[str, Any] = {}
    for batch_size in batch_sizes:
        for name, (acting, decoder) in variants.items():
            works = {
                label: make_work(acting, decoder, prompts, batch_size, num_tokens, share=share)
                for label, share in (("shared", True), ("alone", False))
            }
            interleaved(works, repeats, clock=time.process_time)
            case = f"{name}, batch {batch_size}"
            cases[case] = {
                "runs": {
                    label: {**work.summary(), "prompts_per_second": num_prompts / work.summary()["median_seconds"]}
                    for label, work in works.items()
                },
                "times_the_prompts": round(time_ratio(works["alone"], works["shared"]), 2),
                "same_text": works["alone"].outcome["text"] == works["shared"].outcome["text"],
            }
            print(case, cases[case]["times_the_prompts"], cases[case]["same_text"], flush=True)
    first = next(iter(cases.values()))["times_the_prompts"]
    text = f"prompts/s, {num_prompts} prompts with {common} tokens in common over each on its own, ReFusion"
    config = {
        "repeats": repeats, "threads": threads, "num_prompts": num_prompts, "common": common, "own": 16,
        "num_tokens": num_tokens, "model": SMALL,
    }  # fmt: skip
    summary = [summary_line(text, first)]
    write("shared_prefixes", config, {"cases": cases, "summary": summary}, output=output,
          seconds=time.perf_counter() - started, seed=0)  # fmt: skip


if __name__ == "__main__":
    auto_cli(main)
