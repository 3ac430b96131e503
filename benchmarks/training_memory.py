"""Memory of a training step against the length: what tokens see as ranges, and as a matrix.

usage: python -m benchmarks.training_memory [--lengths '[1024, 2048]']

A step is forward, loss and backward of one row on the small model. Packed rows hold samples of 256 tokens; block's rows
are doubled. Each measurement is a process of its own; its extra memory is the peak above what model and batch take.
Seconds are processor time (one thread).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any, Literal

import torch
from benchmarks.common import SMALL, aim, random_model, write
from benchmarks.memory import peak_resident_bytes, reset_peak, resident_bytes
from jsonargparse import auto_cli

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.packing import pack
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked, Hybrid, Masked, Objective

Way = Literal["ranges", "matrix"]
OBJECTIVES: dict[str, Objective] = {
    "hybrid": Hybrid(), "masked": Masked(), "block": BlockMasked(), "hybrid packed": Hybrid(),
    "block packed": BlockMasked(),
}  # fmt: skip
SAMPLE = 256
"""Tokens of a packed sample."""


def corrupted_of(name: str, length: int, model: Backbone) -> CorruptedBatch:
    """Return a row of a length, packed if the name says so."""
    count = length // SAMPLE if "packed" in name else 1
    size = length // count
    batch = ResponseBatch(
        input_ids=torch.randint(3, SMALL["vocab_size"] - 1, (count, size), generator=torch.Generator().manual_seed(0)),
        prompt_lengths=torch.full((count,), size // 2),
        response_lengths=torch.full((count,), size - size // 2),
        sample_keys=torch.arange(count),
    )
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    corrupted = OBJECTIVES[name].corrupt(batch, noise, model.special_tokens)
    return pack(corrupted, torch.zeros(count, dtype=torch.long), pad_token_id=0) if count > 1 else corrupted


def measure(name: str, length: int, way: Way) -> dict[str, float]:
    """Run a step in this process."""
    model = random_model({**SMALL, "max_position_embeddings": length}).train()

    def step(corrupted: CorruptedBatch) -> None:
        seen = corrupted.visible if way == "ranges" else corrupted.attention_mask
        hidden = model(corrupted.input_ids, corrupted.position_ids, seen)
        OBJECTIVES[name].loss(hidden, model.head, corrupted).total.backward()

    step(corrupted_of(name, 4 * SAMPLE, model))  # loads kernels and makes gradients
    corrupted = corrupted_of(name, length, model)
    reset_peak()
    before, started = resident_bytes(), time.process_time()
    step(corrupted)
    seconds = time.process_time() - started
    return {"extra_megabytes": round((peak_resident_bytes() - before) / 2**20, 1), "seconds": round(seconds, 3)}


def measured_alone(name: str, length: int, way: Way) -> dict[str, float]:
    """Run :func:`measure` in a fresh process."""
    alone = json.dumps([name, length, way])
    arguments = [sys.executable, "-m", "benchmarks.training_memory", "--alone", alone]
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def growth(found: dict[str, dict[str, float]]) -> float:
    """Return what a token takes between the two longest rows over what it takes between the two shortest ones."""
    points = [(int(length), one["extra_megabytes"]) for length, one in found.items()]
    slopes = [(after - before) / (longer - shorter) for (shorter, before), (longer, after) in pairwise(points)]
    return slopes[-1] / slopes[0]


def main(
    lengths: tuple[int, ...] = (2048, 4096, 8192),
    longest_matrix: int = 4096,
    alone: tuple[str, int, Way] | None = None,
    output: str | None = None,
) -> None:
    """Measure.

    Args:
        lengths: Tokens of the row, before it is doubled; at least three.
        longest_matrix: Longer rows are measured without the matrix, which takes gigabytes.
        alone: Print one measurement and stop: objective, length and way.
        output: Where to write the JSON.
    """
    torch.set_num_threads(1)
    if alone is not None:
        sys.stdout.write(json.dumps(measure(*alone)))
        return
    started = time.perf_counter()
    cases: dict[str, Any] = {}
    for name in OBJECTIVES:
        ways: dict[str, dict[str, Any]] = {"ranges": {}, "matrix": {}}
        for length in lengths:
            for way in ("ranges", "matrix"):
                if way == "ranges" or length <= longest_matrix:
                    ways[way][str(length)] = measured_alone(name, length, way)
        memory = [found["extra_megabytes"] for found in ways["ranges"].values()]
        slope = (memory[-1] - memory[0]) * 2**20 / max(lengths[-1] - lengths[0], 1)
        cases[name] = {"ways": ways, "bytes_a_token": round(slope)}
        print(name, cases[name], flush=True)
    text = f"bytes a token from {lengths[-2]} to {lengths[-1]} over those from {lengths[0]} to {lengths[1]}, training"
    aims = [aim(text, max(growth(case["ways"]["ranges"]) for case in cases.values()), 1.25, at_least=False)]
    config = {"lengths": lengths, "longest_matrix": longest_matrix, "sample": SAMPLE, "model": SMALL}
    results = {"cases": cases, "aims": aims}
    write("training_memory", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
