"""Long prompts: what the first token costs, in time and memory, beside transformers' causal prefill of the same body.

usage: python -m benchmarks.long_prompts [--repeats 5] [--lengths '[1024, 4096]']

All take a prompt in, store its keys and values and compute the first token: transformers' body with its own cache and
``lm_head`` at the last token, our autoregressive decoder, and ReFusion with one slot of 8 (its first plan takes the
prompt in; one verification follows). Rounds are interleaved in one process; a ratio is the median over rounds of the
processor time of this process (one thread), since other work may share the machine. Memory is the highest resident
memory during one more call over what was resident before.
"""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Any

import torch
from benchmarks.common import (
    SMALL,
    Work,
    interleaved,
    peak_resident_bytes,
    random_model,
    random_prompts,
    reset_peak,
    resident_bytes,
    summary_line,
    time_ratio,
    write,
)
from benchmarks.peers import ours, replayed
from benchmarks.replay import ALL_ACCEPTED, Replay
from jsonargparse import auto_cli
from transformers import DynamicCache

from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.modeling.backbone import Backbone

OURS = ("autoregressive", "refusion")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def library_prefill(model: Backbone, length: int) -> Work:
    """Return the work of transformers' prefill: body, cache and the last token's logits."""
    ids = torch.tensor([random_prompts(1, length)[0].token_ids])

    @torch.no_grad()
    def run() -> dict[str, Any]:
        cache = DynamicCache(config=model.config)
        states = model.body(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        model.head(states[:, -1:])
        return {"num_tokens": 1, "num_forwards": 1}

    return Work(run)


def make_works(model: Backbone, length: int) -> dict[str, Work]:
    """Return what is compared at a length."""
    prompts = random_prompts(1, length)
    replay = Replay(ALL_ACCEPTED, length, SMALL["vocab_size"] - 1)
    return {
        "transformers": library_prefill(model, length),
        "autoregressive": ours(model, Autoregressive(), prompts, 1),
        "refusion": ours(replayed(model, replay), ReFusion(num_serial_blocks=1), prompts, 8),
    }


def model_for(lengths: tuple[int, ...]) -> Backbone:
    """Return the small model with room for the longest prompt."""
    return random_model({**SMALL, "max_position_embeddings": max(lengths) + 64})


def extra_megabytes(work: Work) -> float:
    """Measure the highest resident memory of one call over that before it (Linux only)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed would serve this one unseen
    reset_peak()
    before = resident_bytes()
    work.run()
    return round((peak_resident_bytes() - before) / 2**20, 1)


def main(
    repeats: int = 5,
    threads: int = 1,
    lengths: tuple[int, ...] = LENGTHS,
    output: str | None = None,
) -> None:
    """Measure.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        lengths: Tokens of the prompt.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    model = model_for(lengths)
    cases: dict[str, Any] = {}
    for length in lengths:
        works = make_works(model, length)
        interleaved(works, repeats, clock=time.process_time)
        cases[str(length)] = {
            "runs": {name: work.summary() for name, work in works.items()},
            "ratios": {name: round(time_ratio(works[name], works["transformers"]), 3) for name in OURS},
            "extra_megabytes": {name: extra_megabytes(work) for name, work in works.items()},
        }
        print(length, cases[str(length)]["ratios"], cases[str(length)]["extra_megabytes"], flush=True)
    highest = {name: max(case["ratios"][name] for case in cases.values()) for name in OURS}
    first, last = lengths[0], lengths[-1]
    memory = [cases[str(length)]["extra_megabytes"]["autoregressive"] for length in (first, last)]
    slope = (memory[1] - memory[0]) * 2**20 / max(last - first, 1)
    text = f"prompts of {first} to {last} tokens over transformers' prefill, {{}}"
    summary = [summary_line(text.format(name), highest[name]) for name in OURS]
    results = {"cases": cases, "bytes_a_token": round(slope), "summary": summary}
    config = {"repeats": repeats, "threads": threads, "lengths": lengths, "model": SMALL}
    write("long_prompts", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
