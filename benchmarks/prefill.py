"""Prefill: what a long prompt costs, in tokens of the prompt a second.

usage: python -m benchmarks.prefill [--repeats 5] [--lengths '[128, 1024]']

Up to the first output: the bare body; our autoregressive decoder with one new token; transformers' ``generate`` with
one; ReFusion with one slot (its first plan takes the prompt in; one verification follows).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from benchmarks.common import VOCABULARY_HEAVY, Work, interleaved, random_model, random_prompts, time_ratio, write
from benchmarks.growth import MODEL as SMALL
from benchmarks.peers import default_variants, library, ours, replayed
from benchmarks.replay import ALL_ACCEPTED, Replay
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.modeling.backbone import Backbone


def body(model: Backbone, length: int) -> Work:
    """Return the work of one call of the body."""
    ids = torch.tensor([random_prompts(1, length)[0].token_ids])
    positions = torch.arange(length)[None]

    @torch.no_grad()
    def run() -> dict[str, Any]:
        model.hidden_states(ids, positions, None)
        return {"num_positions": length}

    return Work(run)


def main(repeats: int = 5, threads: int = 1, lengths: tuple[int, ...] = (128, 1024), output: str | None = None) -> None:
    """Measure prefill.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        lengths: Tokens of the prompt.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    models = {"small": SMALL, "vocabulary-heavy": VOCABULARY_HEAVY}
    fastest = next(iter(default_variants().values()))
    cases: dict[str, Any] = {}
    for name, options in models.items():
        model = random_model(options)
        for length in lengths:
            prompts = random_prompts(1, length)
            acting = replayed(model, Replay(ALL_ACCEPTED, length, options["vocab_size"] - 1))
            works = {
                "body": body(model, length),
                "autoregressive": ours(acting, Autoregressive(), prompts, 1),
                "generate": library(model, prompts, 1),
                "refusion": ours(acting, ReFusion(num_serial_blocks=1, **fastest), prompts, 8),
            }
            interleaved(works, repeats)
            cases[f"{name}, prompt of {length} tokens"] = {
                "runs": {
                    label: {**work.summary(), "prompt_tokens_per_second": length / work.summary()["median_seconds"]}
                    for label, work in works.items()
                },
                "ratios": {
                    f"{label} / body, seconds": round(time_ratio(work, works["body"]), 3)
                    for label, work in works.items()
                },
            }
    config = {"repeats": repeats, "threads": threads, "lengths": lengths, "models": models, "refusion": fastest}
    write("prefill", config, {"cases": cases}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
