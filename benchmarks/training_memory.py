"""Memory of training: of a step against the length, and of the loss, computed in chunks and straightforwardly.

usage: python -m benchmarks.training_memory [--parts '[step, loss]'] [--lengths '[1024, 2048]'] [--device cpu]

``step`` (training_memory.json): forward, loss and backward of one row on the small model, what tokens see given as
ranges and as a matrix. Packed rows hold samples of 256 tokens; block's rows are doubled. ``loss`` (loss_memory.json):
loss and backward alone. Straightforward means float32 logits at every position, then one cross-entropy. Every position
has a label, which is the worst case for the chunked way.

Each measurement is a process of its own; its extra memory is the peak above what model and batch take: the process's
resident memory, on CUDA the allocator's. Seconds are processor time (one thread).
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Literal

import torch
from benchmarks.common import (
    RESULTS,
    SMALL,
    alone,
    peak_resident_bytes,
    random_model,
    reset_peak,
    resident_bytes,
    summary_line,
    write,
)
from jsonargparse import auto_cli
from torch.nn import functional as F

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import LOGITS_BYTES
from refusion_lit.learning.packing import pack
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive, BlockMasked, Hybrid, Masked, Objective

Part = Literal["step", "loss"]
Way = Literal["ranges", "matrix"]
LOSSES = ("straightforward", "chunked")
LOSS_SHAPE = {"batch": 4, "tokens": 1024, "hidden": 256, "vocab": 151_936}
OBJECTIVES: dict[str, Objective] = {
    "hybrid": Hybrid(), "masked": Masked(), "block": BlockMasked(), "hybrid packed": Hybrid(),
    "block packed": BlockMasked(),
}  # fmt: skip
SAMPLE = 256
"""Tokens of a packed sample."""


def make_corrupted(name: str, length: int, model: Backbone) -> CorruptedBatch:
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
    torch.set_num_threads(1)
    model = random_model({**SMALL, "max_position_embeddings": length}).train()

    def step(corrupted: CorruptedBatch) -> None:
        seen = corrupted.visible
        if way == "matrix" and seen is not None:
            seen = ranges_mask(seen, seen.shape[1])
        hidden = model(corrupted.input_ids, corrupted.position_ids, seen)
        OBJECTIVES[name].loss(hidden, model.head, corrupted).total.backward()

    step(make_corrupted(name, 4 * SAMPLE, model))  # loads kernels and makes gradients
    corrupted = make_corrupted(name, length, model)
    reset_peak()
    before, started = resident_bytes(), time.process_time()
    step(corrupted)
    seconds = time.process_time() - started
    return {"extra_megabytes": round((peak_resident_bytes() - before) / 2**20, 1), "seconds": round(seconds, 3)}


def growth(figures: dict[str, dict[str, float]]) -> float:
    """Return what a token takes between the two longest rows over what it takes between the two shortest ones."""
    points = [(int(length), one["extra_megabytes"]) for length, one in figures.items()]
    slopes = [(after - before) / (longer - shorter) for (shorter, before), (longer, after) in pairwise(points)]
    return slopes[-1] / slopes[0]


def measure_loss(way: str, device: str) -> dict[str, Any]:
    """Run loss and backward once in this process, computed in one of ``LOSSES``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = (LOSS_SHAPE["batch"], LOSS_SHAPE["tokens"])
    hidden = torch.randn(*shape, LOSS_SHAPE["hidden"], device=device, requires_grad=True)
    head = torch.nn.Linear(LOSS_SHAPE["hidden"], LOSS_SHAPE["vocab"], bias=False, device=device)
    labels = torch.randint(0, LOSS_SHAPE["vocab"], shape, device=device)
    corrupted = CorruptedBatch(
        input_ids=labels, position_ids=labels, labels=labels, weights=torch.ones(shape, device=device),
        terms=torch.zeros_like(labels), counts=torch.ones(1, device=device),
    )  # fmt: skip
    # A first small loss loads the kernels, whose memory is no part of the comparison.
    F.cross_entropy(head(hidden[0, :2]), labels[0, :2]).backward()
    hidden.grad = head.weight.grad = None

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident_bytes()
    started = time.process_time()
    if way == "straightforward":
        loss = F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten())
    else:
        loss = Autoregressive().loss(hidden, head, corrupted).sums.sum() / labels.numel()
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.process_time() - started
    after = torch.cuda.max_memory_allocated() if device == "cuda" else peak_resident_bytes()
    assert head.weight.grad is not None
    return {
        "extra_megabytes": round((after - before) / 2**20, 1),
        "seconds": round(seconds, 2),
        "loss": loss.item(),
        "gradient_norm": head.weight.grad.norm().item(),
    }


def compared_losses(device: str) -> dict[str, Any]:
    """Measure both ways of the loss."""
    ways = {way: alone("training_memory", "measure_loss", way=way, device=device) for way in LOSSES}
    extra = [ways[way]["extra_megabytes"] for way in ("chunked", "straightforward")]
    return {
        "ways": ways,
        "chunked_over_straightforward": round(extra[0] / extra[1], 4),
        "logits_megabytes_a_chunk": LOGITS_BYTES / 2**20,
    }


def compared_steps(lengths: tuple[int, ...], longest_matrix: int) -> dict[str, Any]:
    """Measure a step of each objective at each length, seen in both ways."""
    cases: dict[str, Any] = {}
    for name in OBJECTIVES:
        ways: dict[str, dict[str, Any]] = {"ranges": {}, "matrix": {}}
        for length in lengths:
            for way in ("ranges", "matrix"):
                if way == "ranges" or length <= longest_matrix:
                    ways[way][str(length)] = alone("training_memory", "measure", name=name, length=length, way=way)
        memory = [figures["extra_megabytes"] for figures in ways["ranges"].values()]
        slope = (memory[-1] - memory[0]) * 2**20 / max(lengths[-1] - lengths[0], 1)
        cases[name] = {"ways": ways, "bytes_a_token": round(slope)}
        print(name, cases[name], flush=True)
    text = f"bytes per token from {lengths[-2]} to {lengths[-1]} over those from {lengths[0]} to {lengths[1]}, training"
    summary = [summary_line(text, max(growth(case["ways"]["ranges"]) for case in cases.values()))]
    return {"cases": cases, "summary": summary}


def main(
    parts: tuple[Part, ...] = ("step", "loss"),
    lengths: tuple[int, ...] = (2048, 4096, 8192),
    longest_matrix: int = 4096,
    device: Literal["cpu", "cuda"] = "cpu",
    directory: str = str(RESULTS),
) -> None:
    """Measure.

    Args:
        parts: What to measure.
        lengths: Tokens of the row of a step, before it is doubled; at least three.
        longest_matrix: Longer rows are measured without the matrix, which takes gigabytes.
        device: Where the loss is computed; steps are measured on the CPU.
        directory: Where to write the JSON of each part.
    """
    started = time.perf_counter()
    if "step" in parts:
        config = {"lengths": lengths, "longest_matrix": longest_matrix, "sample": SAMPLE, "model": SMALL}
        results = compared_steps(lengths, longest_matrix)
        output = f"{directory}/training_memory.json"
        write("training_memory", config, results, output=output, seconds=time.perf_counter() - started, seed=0)
        started = time.perf_counter()
    if "loss" in parts:
        config = {"shape": LOSS_SHAPE, "device": device}
        results = compared_losses(device)
        output = f"{directory}/loss_memory.json"
        write("loss_memory", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
