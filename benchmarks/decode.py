"""Decoding: our ReFusion against a plain one, transformers' ``generate`` and LLaDA, in one run.

usage: python -m benchmarks.decode [--repeats 5] [--threads 1] [--parts '[golden, heavy]']

``golden``: additions-clean in the six settings of the reference outputs, batch 1. ``heavy``: hidden size 256, 6 layers,
151 936 tokens, random weights with replayed schedules, short (32 tokens), middle (128) and long (512) answers. For
batch sizes, see ``batches.py``.

The plain ReFusion is the program that checkpoints export for transformers. It and ``generate`` run transformers'
forward, our decoders the fused one, except for the variant whose name says so: what it makes of the plain ReFusion is
the algorithm's part of the speed.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any, Literal

import torch
from benchmarks.common import (
    VOCABULARY_HEAVY,
    Work,
    golden_model,
    golden_runs,
    interleaved,
    random_model,
    random_prompts,
    refusion_options,
    speed_ratio,
    summary_line,
    with_library_body,
    write,
)
from benchmarks.peers import Variants, check_same_text, default_variants, library, ours, plain, replayed
from benchmarks.replay import SCHEDULES, Replay
from jsonargparse import auto_cli

from refusion_lit.decoding import Autoregressive, LLaDA, ReFusion
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import ModelTraits, Prompt

Part = Literal["golden", "heavy"]
PROMPT_LENGTH = 32
LIBRARY_BODY = "{} on transformers' body"


def _case(name: str, works: dict[str, Work], ratios: dict[str, float]) -> dict[str, Any]:
    return {
        "case": name,
        "runs": {name: work.summary() for name, work in works.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
    }


def golden(variants: Variants, repeats: int, num_prompts: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare at batch 1 in the six golden settings."""
    reference, model = golden_runs("clean"), golden_model("clean")
    bidirectional = golden_model("bidirectional", attention="bidirectional")
    cases, speedups, against_generate = [], [], []
    main = next(iter(variants))
    for number, setting in enumerate(reference["settings"]):
        runs = [run for run in reference["runs"] if run["setting"] == number][:num_prompts]
        prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
        length, options = setting["gen_length"], refusion_options(setting)
        same = {name: ours(model, ReFusion(**options, **more), prompts, length) for name, more in variants.items()}
        by_library = LIBRARY_BODY.format(main)
        same[by_library] = ours(with_library_body(model), ReFusion(**options, **variants[main]), prompts, length)
        same = {"plain": plain(model, ReFusion(**options), prompts, length), **same}
        works = {
            **same,
            "generate": library(model, prompts[:4], length),
            "autoregressive": ours(model, Autoregressive(), prompts[:4], length, max_repeats=2),
            "llada": ours(bidirectional, LLaDA(), prompts[:2], length, max_repeats=2),
        }
        interleaved(works, repeats, seed=number)
        check_same_text(same)
        speedups.append(speed_ratio(same[main], same["plain"]))
        per_forward = works[main].summary()["tokens_per_forward"]
        against_generate.append(speed_ratio(works[main], works["generate"]) / per_forward)
        shown = (*variants, by_library)
        ratios = {f"{name} / plain": speed_ratio(same[name], same["plain"]) for name in shown}
        ratios |= {f"{name} / generate": speed_ratio(works[name], works["generate"]) for name in (*shown, "llada")}
        ratios["tokens/s over generate's, divided by tokens per forward"] = against_generate[-1]
        cases.append(_case(f"additions-clean, setting {number + 1}, batch 1", works, ratios))
    mean = statistics.geometric_mean
    summary = [
        summary_line("additions-clean, batch 1, setting 1: times the plain ReFusion", speedups[0]),
        summary_line("additions-clean, batch 1, mean of six settings: times the plain ReFusion", mean(speedups)),
        summary_line("additions-clean, batch 1, mean: tokens/s over generate's, divided by tokens per forward",
            mean(against_generate)),
    ]  # fmt: skip
    return cases, summary


def heavy(variants: Variants, repeats: int, scale: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare on the vocabulary-heavy model with replayed schedules."""
    model = random_model(VOCABULARY_HEAVY)
    mask = model.special_tokens.mask_token_id
    assert mask is not None
    bidirectional = Backbone(model.model, ModelTraits(attention="bidirectional"), model.special_tokens)  # same weights
    main = next(iter(variants))
    cases, summary = [], []
    for label, schedule in SCHEDULES.items():
        replay = Replay(schedule, PROMPT_LENGTH, mask)
        acting = replayed(model, replay)
        for answer, sizes in ((32, (1, 4, 16, 64)), (128, (1, 4, 16)), (512, (1,))):
            answer_ = max(int(answer * scale) // 32 * 32, 32)
            options: dict[str, Any] = {"slot_size": 8, "num_serial_blocks": max(answer_ // 128, 1)}
            one = random_prompts(1, PROMPT_LENGTH)
            alone = {
                name: ours(
                    acting, ReFusion(**options, **more), one, answer_, max_repeats=repeats if answer < 512 else 2
                )
                for name, more in variants.items()
            }
            by_library = LIBRARY_BODY.format(main)
            alone[by_library] = ours(
                replayed(with_library_body(model), replay), ReFusion(**options, **variants[main]), one, answer_,
                max_repeats=repeats if answer < 512 else 2,
            )  # fmt: skip
            alone["plain"] = plain(model, ReFusion(**options), one, answer_, replay, repeats if answer < 512 else 2)
            works = {f"{name}, batch 1": work for name, work in alone.items()}
            works["generate, batch 1"] = library(model, one, answer_, max_repeats=2)
            if answer == 128:
                works["autoregressive, batch 1"] = ours(acting, Autoregressive(), one, answer_, max_repeats=2)
                works["llada, 4 tokens per step, batch 1"] = ours(
                    replayed(bidirectional, replay), LLaDA(steps=answer_ // 4), one, answer_, max_repeats=2
                )
            for size in sizes[1:]:
                many = random_prompts(size, PROMPT_LENGTH)
                decoder = ReFusion(**options, **variants[main])
                works[f"{main}, batch {size}"] = ours(acting, decoder, many, answer_, size, max_repeats=2)
                works[f"generate, batch {size}"] = library(model, many, answer_, size, max_repeats=2)
            interleaved(works, repeats)
            check_same_text(alone)
            shown = (*variants, by_library)
            ratios = {f"{name} / plain": speed_ratio(alone[name], alone["plain"]) for name in shown}
            ratios |= {f"{name} / generate": speed_ratio(alone[name], works["generate, batch 1"]) for name in shown}
            for size in sizes[1:]:
                ratio = speed_ratio(works[f"{main}, batch {size}"], works[f"{main}, batch 1"])
                ratios[f"{main}, batch {size} / batch 1"] = ratio
            cases.append(_case(f"vocabulary-heavy, {label}, {answer_} tokens", works, ratios))
            if answer == 128 and not schedule.prefixes:
                summary.append(
                    summary_line("vocabulary-heavy, batch 1, all accepted: times the plain ReFusion",
                        ratios[f"{main} / plain"])
                )  # fmt: skip
    return cases, summary


def main(
    repeats: int = 5,
    threads: int = 1,
    parts: tuple[Part, ...] = ("golden", "heavy"),
    variants: Variants | None = None,
    num_prompts: int = 64,
    scale: float = 1.0,
    output: str | None = None,
) -> None:
    """Measure decoding.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        parts: What to measure.
        variants: Options of ReFusion by name; the summary is about the first.
        num_prompts: Prompts of the small model's cases (20 a setting at most).
        scale: Factor of the vocabulary-heavy answers' lengths; below 1 for a trial.
        output: Where to write the JSON.
    """
    warnings.filterwarnings("ignore", message=".* does not fit this model")
    torch.set_num_threads(threads)
    started = time.perf_counter()
    variants = variants or default_variants()
    config = {
        "repeats": repeats, "threads": threads, "parts": parts, "variants": variants, "num_prompts": num_prompts,
        "scale": scale, "vocabulary_heavy": VOCABULARY_HEAVY, "prompt_length": PROMPT_LENGTH,
    }  # fmt: skip
    cases: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    for part in parts:
        if part == "golden":
            figures = golden(variants, repeats, num_prompts)
        else:
            figures = heavy(variants, max(repeats - 2, 1), scale)
        cases += figures[0]
        summary += figures[1]
    seconds = time.perf_counter() - started
    write("decode", config, {"summary": summary, "cases": cases}, output=output, seconds=seconds, seed=0)


if __name__ == "__main__":
    auto_cli(main)
