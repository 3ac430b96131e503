"""Soak test: decode for an hour and measure resident memory, which must stay flat.

usage: python -m benchmarks.soak [--minutes 60] [--model tests/goldens/models/additions-clean]

Each round decodes new prompts with ReFusion, RecomputeKV, LLaDA, FastDLLM, BlockDiffusion and Autoregressive, at random
options, batch sizes, temperatures and bounds on the cache, in one process. Half of the calls have prompts with a common
prefix. Resident memory is read every minute, after ``malloc_trim`` has returned freed memory to the system: malloc
keeps up to 20 MB of it with this model (``kept_megabytes``), an amount that changes from round to round and has nothing
to do with what is in use. The first tenth of the time and the first 3000 decodes are warm-up. The result,
benchmarks/results/soak.json, has the curve and the slope of a straight line through it, in MB per hour.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import GOLDENS, resident_bytes, write
from jsonargparse import auto_cli

import refusion_lit
from refusion_lit.decoding import Autoregressive, BlockDiffusion, Decoder, FastDLLM, LLaDA, RecomputeKV, ReFusion
from refusion_lit.tasks import Additions
from refusion_lit.types import SamplingParams


def decoders(rng: random.Random) -> list[Decoder]:
    """Draw the options of the six decoders."""
    slots: dict[str, Any] = {
        "slot_size": rng.choice([2, 4, 8, 16]),
        "num_serial_blocks": rng.choice([1, 2]),
        "slot_threshold": rng.choice([0.3, 0.6, 0.9, 1.0]),
        "token_threshold": rng.choice([0.3, 0.9, 1.0]),
    }
    return [
        ReFusion(**slots),
        RecomputeKV(**slots),
        LLaDA(steps=rng.choice([8, 16])),
        FastDLLM(block_length=rng.choice([8, 16, 32]), cache=rng.choice(["none", "prefix", "dual"])),
        BlockDiffusion(block_size=rng.choice([4, 8]), threshold=rng.choice([0.3, 0.9])),
        Autoregressive(),
    ]


def main(
    minutes: float = 60,
    model: str = str(GOLDENS / "models" / "additions-clean"),
    warmup_decodes: int = 3000,
    seed: int = 0,
    output: str | None = None,
) -> None:
    """Run and write the result.

    Args:
        minutes: How long to decode.
        model: Directory of a model.
        warmup_decodes: Memory counts after so many decodes.
        seed: Of options and prompts.
        output: Where to write the JSON.
    """
    warnings.filterwarnings("ignore", message=".* does not fit this model")
    torch.set_num_threads(1)
    loaded = refusion_lit.load(model)
    rng = random.Random(seed)
    queries = Additions(num_train=1000, num_validation=1, num_test=1).examples("train")
    preface = "".join(example.query for example in queries[:6])  # long enough to be shared
    curve: list[tuple[float, float, int]] = []
    kept: list[float] = []
    start = last = time.monotonic()
    num_decodes = num_tokens = 0
    while time.monotonic() - start < minutes * 60:
        for decoder in decoders(rng):
            beginning = rng.choice(["", preface])
            chosen = [beginning + queries[rng.randrange(1000)].query for _ in range(rng.choice([1, 3, 16]))]
            sampling = SamplingParams(max_new_tokens=64, temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1000))
            answers = loaded.generate(
                chosen, decoder=decoder, sampling=sampling, batch_size=rng.choice([1, 4, 16]), allow_mismatch=True,
                max_cache_tokens=rng.choice([None, 1000]),
            )  # fmt: skip
            num_decodes += len(answers)
            num_tokens += sum(answer.num_tokens for answer in answers)
        if time.monotonic() - last >= min(60, minutes * 60 / 20):
            gc.collect()
            before = resident_bytes()
            ctypes.CDLL(None).malloc_trim(0)
            last = time.monotonic()
            curve.append(((last - start) / 60, resident_bytes() / 2**20, num_decodes))
            kept.append((before - resident_bytes()) / 2**20)
    steady = [(m, mb) for m, mb, decodes in curve if m >= minutes / 10 and decodes >= warmup_decodes]
    if len(steady) < 10:
        raise SystemExit(f"minutes: {num_decodes} decodes are too few; run it longer or where less else runs.")
    slope = float(np.polyfit([m / 60 for m, _ in steady], [mb for _, mb in steady], 1)[0])
    result = {
        "minutes": minutes,
        "num_decodes": num_decodes,
        "num_tokens": num_tokens,
        "megabytes_an_hour": round(slope, 2),
        "lowest_megabytes": round(min(mb for _, mb in steady), 1),
        "highest_megabytes": round(max(mb for _, mb in steady), 1),
        "kept_megabytes": round(max(kept), 1),
        "processor_minutes": round(time.process_time() / 60, 1),
        "curve": [[round(m, 2), round(mb, 2), decodes] for m, mb, decodes in curve],
    }
    config = {"model": Path(model).name, "warmup_decodes": warmup_decodes}
    write("soak", config, result, output=output, seconds=time.monotonic() - start, seed=seed)
    print(f"{num_decodes} decodes, {slope:.2f} MB per hour")


if __name__ == "__main__":
    auto_cli(main)
