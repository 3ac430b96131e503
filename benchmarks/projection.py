"""Projection beside measurement: speeds predicted from counted calls, with constants fitted on next-token decoding.

usage: python -m benchmarks.projection [--repeats 3] [--threads 1] [--num_tokens 32] [--note TEXT] [--output FILE]

About ten minutes of a quiet machine. The model has SmolLM2-135M's dimensions and random weights; a replayed schedule
decides what is accepted (benchmarks/replay.py). Decoders run in turns at batch sizes 1, 4 and 16; seconds are processor
time of this process if it has one thread. Three constants are fitted on ``Autoregressive`` alone, also with a long
prompt: bandwidth, operations per second, cost per launch. They predict all other decoders. A second part needs no
clock: what the published settings of ReFusion, LLaDA and Qwen3-8B would give on named GPUs, beside the speeds in the
ReFusion paper's table.

Writes ``benchmarks/results/projection.json``, which ``nox -s figures`` (``python -m docs.figures``) shows on
docs/projection.md in the tables ``projection`` and ``projection paper``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from benchmarks.common import SMALL, decoded, interleaved, random_model, random_prompts, write
from benchmarks.common import Work as Timed
from benchmarks.replay import ACCEPTED_IN_PARTS, ALL_ACCEPTED, Replay, ReplayedModel, Schedule
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, CallShapes, Decoder, LLaDA, ReFusion
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.reports.projection import DEVICES, MODELS, Device, ModelSize, project
from refusion_lit.types import ModelTraits, Prompt

MODEL = "SmolLM2-135M"
SIZES = (1, 4, 16)
PROMPT_LENGTH, LONG_PROMPT = 64, 256
LONG_SIZES = (1, 4)


@dataclass
class Setting:
    """A decoder at a batch size, its timed work and its calls, which every run counts."""

    decoder: str
    batch_size: int
    prompt_length: int
    work: Timed
    shapes: CallShapes


def config(size: ModelSize) -> dict[str, Any]:
    """Return the dimensions of a model for :func:`~benchmarks.common.random_model`."""
    return {
        "hidden_size": size.hidden_size, "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers, "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads, "head_dim": size.head_dim, "vocab_size": size.vocab_size,
    }  # fmt: skip


def replayed_decoders(model: Backbone, num_tokens: int) -> dict[str, tuple[Backbone, Schedule, Decoder]]:
    """Return model, schedule and decoder by name; all models have the same weights."""
    bidirectional = Backbone(model.model, ModelTraits(attention="bidirectional"), model.special_tokens)
    reference = {"fused": False, "infill_layout": "reference"}
    return {
        "Autoregressive": (model, ALL_ACCEPTED, Autoregressive()),
        "ReFusion, all accepted": (model, ALL_ACCEPTED, ReFusion()),
        "ReFusion, every second round in parts": (model, ACCEPTED_IN_PARTS, ReFusion()),
        "ReFusion, the released program's calls": (model, ACCEPTED_IN_PARTS, ReFusion(**reference)),
        "LLaDA, 4 tokens per call": (bidirectional, ALL_ACCEPTED, LLaDA(steps=num_tokens // 4)),
    }


def settings(size: ModelSize, num_tokens: int) -> list[Setting]:
    """Return all settings."""
    model = random_model(config(size))
    entries = []
    for name, (body, schedule, decoder) in replayed_decoders(model, num_tokens).items():
        for batch_size in SIZES:
            is_long = name == "Autoregressive" and batch_size in LONG_SIZES  # prefill shows the operations per second
            for length in (PROMPT_LENGTH, LONG_PROMPT) if is_long else (PROMPT_LENGTH,):
                prompts = random_prompts(batch_size, length)
                answer = num_tokens if length == PROMPT_LENGTH else 8
                entries.append(setting(name, body, schedule, decoder, prompts, answer))
    return entries


def setting(
    name: str, model: Backbone, schedule: Schedule, decoder: Decoder, prompts: Sequence[Prompt], num_tokens: int
) -> Setting:
    """Return a setting: all prompts are decoded together."""
    length = len(prompts[0].token_ids)
    mask = model.special_tokens.mask_token_id
    assert mask is not None
    acting = ReplayedModel(model, Replay(schedule, length, mask))

    entry = Setting(name, len(prompts), length, Timed(dict), CallShapes())

    def run() -> dict[str, Any]:
        output = decoded(acting, decoder, prompts, num_tokens, len(prompts))
        assert output.call_shapes is not None
        entry.shapes = output.call_shapes  # the same in every round
        return {"num_tokens": sum(row.num_tokens for row in output.rows), "num_calls": output.num_calls,
                "num_forwards": sum(row.num_forwards for row in output.rows)}  # fmt: skip

    entry.work.run = run
    return entry


def fit(measured: Sequence[tuple[CallShapes, float]], size: ModelSize) -> Device:
    """Fit bandwidth, operations per second and cost per launch by least squares of relative errors.

    Times are linear in the three unknown costs, because reading and calculating add up on a thread of a CPU. A cost
    that would be negative is left out.

    Args:
        measured: Counted calls and their seconds.
        size: The model's dimensions.
    """
    unit = {"bytes_per_value": 4, "overlaps": False, "source": "unit costs"}
    never = float("inf")
    units = [
        Device(bytes_per_second=1.0, operations_per_second=never, launch_seconds=0.0, **unit),
        Device(bytes_per_second=never, operations_per_second=1.0, launch_seconds=0.0, **unit),
        Device(bytes_per_second=never, operations_per_second=never, launch_seconds=1.0, **unit),
    ]
    amounts = np.array(
        [[project(shapes, size, one).seconds / seconds for one in units] for shapes, seconds in measured]
    )
    best, costs = never, np.zeros(3)
    for number in range(1, 4):
        for kept in map(list, itertools.combinations(range(3), number)):
            solution = np.linalg.lstsq(amounts[:, kept], np.ones(len(measured)), rcond=None)[0]
            error = float(((amounts[:, kept] @ solution - 1) ** 2).sum())
            if (solution > 0).all() and error < best:
                best, costs = error, np.zeros(3)
                costs[kept] = solution
    reading, calculating, launching = (float(cost) for cost in costs)
    return Device(
        bytes_per_second=1 / reading if reading else never,
        operations_per_second=1 / calculating if calculating else never,
        launch_seconds=launching,
        bytes_per_value=4,
        overlaps=False,
        source="fitted on Autoregressive",
    )


def compare(entries: Sequence[Setting], size: ModelSize) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the fitted constants, and measured beside predicted speeds."""
    seconds = [statistics.median(entry.work.seconds) for entry in entries]
    sequential = [
        (entry.shapes, measured)
        for entry, measured in zip(entries, seconds, strict=True)
        if entry.decoder == "Autoregressive"
    ]
    device = fit(sequential, size)
    rows = []
    for entry, measured in zip(entries, seconds, strict=True):
        predicted = project(entry.shapes, size, device)
        num_tokens = entry.work.outcome["num_tokens"]
        rows.append({
            "decoder": entry.decoder, "batch_size": entry.batch_size, "prompt_length": entry.prompt_length,
            "num_tokens": num_tokens, "tokens_per_call": round(num_tokens / entry.work.outcome["num_calls"], 3),
            "measured": round(num_tokens / measured, 2), "predicted": round(num_tokens / predicted.seconds, 2),
            "ratio": round(measured / predicted.seconds, 3), "is_fitted": entry.decoder == "Autoregressive",
            "seconds": entry.work.seconds, "call_shapes": entry.shapes.lines(),
        })  # fmt: skip
    constants = {
        "gigabytes_per_second": round(device.bytes_per_second / 1e9, 3),
        "gigaflops": round(device.operations_per_second / 1e9, 3),
        "launch_microseconds": round(device.launch_seconds * 1e6, 3),
    }
    return constants, rows


PUBLISHED: dict[str, dict[str, float]] = {
    "Qwen3-8B": {"MMLU-Pro": 31.42, "ARC-C": 42.78, "GSM8K": 31.20, "MATH": 30.11, "GPQA": 30.43, "HumanEval": 30.95,
                 "MBPP": 30.07},
    "LLaDA-8B": {"MMLU-Pro": 18.21, "ARC-C": 0.03, "GSM8K": 27.35, "MATH": 23.93, "GPQA": 1.99, "HumanEval": 12.42,
                 "MBPP": 2.97},
    "Dream-7B": {"MMLU-Pro": 15.98, "ARC-C": 0.06, "GSM8K": 20.30, "MATH": 18.99, "GPQA": 1.81, "HumanEval": 3.51,
                 "MBPP": 1.23},
    "ReFusion": {"MMLU-Pro": 52.74, "ARC-C": 32.46, "GSM8K": 81.24, "MATH": 81.77, "GPQA": 64.11, "HumanEval": 103.90,
                 "MBPP": 92.09},
}  # fmt: skip
"""Tokens per second in the table of the ReFusion paper (arXiv 2512.13586; images/results.png of its repository)."""

ANSWER_LENGTH, PAPER_PROMPT = 512, 128
"""``gen_length`` of the released eval.sh; the prompts' length is an assumption."""

TOKENS_PER_CALL = (1.5, 2.0, 2.5, 3.0, 4.0)
"""ReFusion's tokens per forward pass are not published, so a range is calculated."""


def paper_shapes() -> dict[str, tuple[int, CallShapes]]:
    """Return the number of committed tokens and the calls of the paper's decoders for an answer of full length.

    Qwen3-8B: a token per call, with a cache. LLaDA: a token per call on the whole canvas, without a cache. Both are
    counted by the engine. ReFusion: calls of the released program's kind in the published setting (slots of 32 tokens,
    four serial blocks), for a schedule that accepts in parts; :func:`paper` then varies the tokens per call.
    """
    model = random_model({**SMALL, "num_hidden_layers": 1, "vocab_size": 4096})
    prompts = random_prompts(1, PAPER_PROMPT)
    schedules: dict[str, tuple[ModelTraits, Decoder]] = {
        "Qwen3-8B": (ModelTraits(attention="causal"), Autoregressive()),
        "LLaDA-8B": (ModelTraits(attention="bidirectional"), LLaDA(steps=ANSWER_LENGTH)),
        "ReFusion": (model.traits, ReFusion(slot_size=32, num_serial_blocks=4, fused=False, infill_layout="reference")),
    }
    ratios = {}
    for name, (traits, decoder) in schedules.items():
        body = Backbone(model.model, traits, model.special_tokens)
        schedule = Schedule(slot_size=32, slots_a_round=2, prefixes=(8, 16)) if name == "ReFusion" else ALL_ACCEPTED
        counted = setting(name, body, schedule, decoder, prompts, ANSWER_LENGTH)
        counted.work.run()
        ratios[name] = (ANSWER_LENGTH, counted.shapes)
    return ratios


def geometric_mean_ratio(fast: str, slow: Sequence[str]) -> float:
    """Return the geometric mean of published speed ratios over tasks and slower models."""
    return statistics.geometric_mean(
        PUBLISHED[fast][task] / PUBLISHED[name][task] for name in slow for task in PUBLISHED[fast]
    )


def paper() -> dict[str, Any]:
    """Return predicted ratios beside the published ones."""
    counted = paper_shapes()
    sizes = {"Qwen3-8B": MODELS["Qwen3-8B"], "LLaDA-8B": MODELS["LLaDA-8B"], "ReFusion": MODELS["Qwen3-8B"]}
    own_calls = sum(calls for (_, positions, _), (calls, _) in counted["ReFusion"][1].counts.items() if positions)
    rows = []
    for name, device in DEVICES.items():
        speeds = {
            model: tokens / project(shapes, sizes[model], device).seconds for model, (tokens, shapes) in counted.items()
        }
        calls_per_second = speeds["ReFusion"] / (ANSWER_LENGTH / own_calls)

        def over(model: str, rate: float = calls_per_second, base: dict[str, float] = speeds) -> dict[str, float]:
            return {f"{tokens:g}": round(rate * tokens / base[model], 2) for tokens in TOKENS_PER_CALL}

        rows.append(
            {
                "device": name,
                "qwen": round(speeds["Qwen3-8B"], 1),
                "llada": round(speeds["LLaDA-8B"], 1),
                "refusion": {f"{tokens:g}": round(calls_per_second * tokens, 1) for tokens in TOKENS_PER_CALL},
                "over_qwen": over("Qwen3-8B"),
                "over_llada": over("LLaDA-8B"),
            }
        )
    tasks = PUBLISHED["ReFusion"]
    ratios = {name: {task: round(tasks[task] / PUBLISHED[name][task], 2) for task in tasks} for name in PUBLISHED}
    others = [task for task in tasks if task != "ARC-C"]
    return {
        "published": PUBLISHED,
        "published_ratios": ratios,
        "mean_over_qwen": round(statistics.fmean(ratios["Qwen3-8B"].values()), 2),
        "geometric_mean_over_diffusion": round(geometric_mean_ratio("ReFusion", ["LLaDA-8B", "Dream-7B"]), 1),
        "geometric_mean_over_llada_without_arc": round(
            statistics.geometric_mean(ratios["LLaDA-8B"][task] for task in others), 1
        ),
        "devices": rows,
    }


def main(repeats: int = 3, threads: int = 1, num_tokens: int = 32, note: str = "", output: str | None = None) -> None:
    """Measure, fit, predict and write.

    Args:
        repeats: Timed rounds; every round runs all settings in a new order.
        threads: torch's threads.
        num_tokens: New tokens per prompt, a multiple of 32.
        note: What readers should know of this run, for example other work on the machine.
        output: Result file; by default benchmarks/results/projection.json.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    size = MODELS[MODEL]
    entries = settings(size, num_tokens)
    works = {str(number): entry.work for number, entry in enumerate(entries)}
    interleaved(works, repeats, clock=time.process_time if threads == 1 else None)
    constants, rows = compare(entries, size)
    for row in rows:
        print(*(row[name] for name in ("decoder", "batch_size", "prompt_length", "measured", "predicted", "ratio")))
    others = [abs(row["predicted"] / row["measured"] - 1) for row in rows if not row["is_fitted"]]
    results: Mapping[str, Any] = {
        "constants": constants, "rows": rows, "largest_error": round(max(others), 3), "paper": paper(),
        **({"note": note} if note else {}),
    }  # fmt: skip
    print(constants, f"largest error of other decoders: {100 * max(others):.0f} %")
    described = {"model": MODEL, "repeats": repeats, "threads": threads, "num_tokens": num_tokens,
                 "prompt_lengths": [PROMPT_LENGTH, LONG_PROMPT]}  # fmt: skip
    write("projection", described, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
