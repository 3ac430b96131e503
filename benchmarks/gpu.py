"""Decoding on a GPU in bfloat16, and how near it comes to what the memory's bandwidth allows.

usage: python -m benchmarks.gpu [--model qwen3-8b] [--batches '[1, 8, 64]'] [--max_minutes 9]

Random weights in the shapes of Qwen3-0.6B and Qwen3-8B with replayed schedules: ReFusion, the plain ReFusion that
checkpoints export, one token per forward, and transformers' ``generate``. At small batches a forward cannot be faster
than its weights and KV cache can be read: the limit is that many bytes over the bandwidth that a copy
reaches on the same device. The profiler says how often the host waits for the device in a call, and for which share of
the time the device has nothing to do. ``--model tiny --device cpu`` tries the program without a GPU; such figures mean
nothing.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from typing import Any, Literal

import torch
from benchmarks.common import Work, interleaved, now, random_model, random_prompts, speed_ratio, summary_line, write
from benchmarks.peers import check_same_text, library, ours, plain, replayed
from benchmarks.replay import SCHEDULES, Replay
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.modeling.backbone import Backbone

Shape = Literal["qwen3-0.6b", "qwen3-8b", "tiny"]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip


def bandwidth(device: str, megabytes: int) -> float:
    """Return the bytes per second that a copy reads and writes on a device: the best of some."""
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        started = now()
        target.copy_(source)
        best = min(best, now() - started)
    return 2 * source.nbytes / best


def bytes_read(model: Backbone, num_calls: int, num_rows: int, mean_context: float) -> float:
    """Return the bytes of weights and cache that calls must read, each weight once per call.

    Of the embedding only a few rows are read, unless it is the head's weight too.
    """
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.model.get_input_embeddings().weight.nbytes
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.head.weight.itemsize
    return num_calls * (weights + num_rows * mean_context * entry)


def profiled(work: Work) -> dict[str, Any]:
    """Run a work under the profiler: waits of the host per call, and the share of its usual time without a kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        outcome = work.run()
    events = profiler.events() or []
    waits = Counter(event.name for event in events if event.name.startswith("cuda") and "Synchronize" in event.name)
    busy = sum(event.self_device_time_total for event in events if event.device_type.name == "CUDA") * 1e-6
    calls = outcome.get("num_calls", outcome["num_forwards"])
    return {
        "waits_a_call": {name: round(count / calls, 2) for name, count in waits.items()},
        "share_of_time_without_kernel": round(max(0.0, 1 - busy / work.summary()["median_seconds"]), 4),
    }


def make_works(
    model: Backbone, replay: Replay, size: int, prompt_length: int, num_tokens: int
) -> tuple[dict[str, Work], dict[str, Work]]:
    """Return the works of a batch size that must give the same text, and the others."""
    acting = replayed(model, replay)
    prompts = random_prompts(size, prompt_length)
    options = ReFusion(slot_size=8, num_serial_blocks=1)
    same = {"refusion": ours(acting, options, prompts, num_tokens, size)}
    if size == 1:
        same["plain"] = plain(model, options, prompts, num_tokens, replay)
    others = {
        "autoregressive": ours(acting, Autoregressive(), prompts, num_tokens, size, max_repeats=2),
        "generate": library(model, prompts, num_tokens, size, max_repeats=2),
    }
    return same, others


def summarize(model: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of batch 1."""
    rows = []
    for case in (case for case in cases if case["batch"] == 1):
        run = case["runs"]["refusion"]
        speed = case["ratios"]["refusion / generate"] / run["tokens_per_forward"]
        share = run["share_of_bandwidth_limit"]
        text = f"{case['case']}: tokens/s over generate's, divided by tokens per forward"
        rows.append(summary_line(text, speed))
        rows.append(summary_line(f"{case['case']}: share of the bandwidth limit", share))
        if model == "qwen3-8b":
            idle = run["share_of_time_without_kernel"]
            rows.append(summary_line(f"{case['case']}: share of the time without a kernel", idle))
    return rows


def main(
    model: Shape = "qwen3-0.6b",
    batches: tuple[int, ...] = (1, 8, 64),
    num_tokens: int = 128,
    prompt_length: int = 128,
    repeats: int = 3,
    max_minutes: float = 9,
    device: Literal["cuda", "cpu"] = "cuda",
    output: str | None = None,
) -> None:
    """Measure decoding on a GPU.

    Args:
        model: Shape of the model.
        batches: Prompts that are decoded together.
        num_tokens: Tokens of an answer, a multiple of 16.
        prompt_length: Tokens of a prompt.
        repeats: Rounds of the interleaved timing.
        max_minutes: Cases that would start later are left out, and the result says which.
        device: ``cpu`` only to try the program.
        output: Where to write the JSON.
    """
    check_device(device)
    warnings.filterwarnings("ignore", message=".* does not fit this model")
    started = time.perf_counter()
    measured_bandwidth = bandwidth(device, 1024 if device == "cuda" else 64)
    backbone = random_model(SHAPES[model], dtype=torch.bfloat16, device=device)
    cases, left_out = [], []
    for size in batches:
        for label, schedule in SCHEDULES.items():
            name = f"{model}, {label}, batch {size}"
            if time.perf_counter() - started > max_minutes * 60:
                left_out.append(name)
                continue
            replay = Replay(schedule, prompt_length, SHAPES[model]["vocab_size"] - 1)
            same, others = make_works(backbone, replay, size, prompt_length, num_tokens)
            works = {**same, **others}
            interleaved(works, repeats)
            check_same_text(same)
            runs = {}
            for work_name, work in works.items():
                summary = work.summary()
                calls = summary.get("num_calls", summary["num_forwards"] / size)
                read = bytes_read(backbone, calls, size, prompt_length + num_tokens / 2)
                summary["share_of_bandwidth_limit"] = read / measured_bandwidth / summary["median_seconds"]
                runs[work_name] = {**summary, **profiled(work)}
            ratios = {
                f"{one} / {peer}": round(speed_ratio(works[one], works[peer]), 3)
                for one in same
                for peer in works
                if one != peer
            }
            cases.append({"case": name, "batch": size, "runs": runs, "ratios": ratios})
            print(name, {one: run["tokens_per_second"] for one, run in runs.items()}, flush=True)
            del works, same, others
            gc.collect()
    config = {
        "model": SHAPES[model], "batches": batches, "num_tokens": num_tokens, "prompt_length": prompt_length,
        "repeats": repeats, "dtype": "bfloat16", "device": device,
    }  # fmt: skip
    results = {"bandwidth_bytes_per_second": measured_bandwidth, "cases": cases, "left_out": left_out}
    results["summary"] = summarize(model, cases) if device == "cuda" else []
    write(f"gpu_{model}", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "device: expected a CUDA device, found none. Run this on a machine with a GPU and a CUDA build of torch, "
            "or try the program with --device cpu --model tiny."
        )


if __name__ == "__main__":
    auto_cli(main)
