"""Overhead: the share of decoding that is spent outside the model's body and head.

usage: python -m benchmarks.overhead [--repeats 9]

ReFusion answers the prompts of the six settings of the reference outputs on additions-clean, one at a time, with the
fused body. What the model's ``runner`` and ``head_runner`` return is timed from outside; what is left is ours.
Seconds are processor time of this process, one thread.
"""

from __future__ import annotations

import statistics
import time
from functools import wraps
from typing import Any

import torch
from benchmarks.common import decoded, golden_model, golden_runs, refusion_options, summary_line, write
from jsonargparse import auto_cli

from refusion_lit.decoding import ReFusion
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt

PARTS = ("body", "head")
"""What is timed."""


def timed(model: LanguageModel) -> dict[str, float]:
    """Let a model note the seconds of its body and head; return where they are added up."""
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def noted(part: str, method: Any) -> Any:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            result = method(*args, **kwargs)
            seconds[part] += time.process_time() - started
            return result

        return call

    make_body: Any = model.runner
    make_head: Any = model.head_runner
    model.runner = lambda: noted("body", make_body())  # type: ignore[method-assign]
    model.head_runner = lambda: noted("head", make_head())  # type: ignore[method-assign]
    return seconds


def measured(model: LanguageModel, seconds: dict[str, float], setting: dict[str, Any], prompts: list[Prompt],
             repeats: int) -> dict[str, Any]:  # fmt: skip
    """Return the share of a setting's time outside body and head, and milliseconds of each part per forward."""
    rounds: list[dict[str, float]] = []
    num_calls = 0
    for _ in range(repeats + 1):
        seconds.update(dict.fromkeys(PARTS, 0.0))
        started = time.process_time()
        output = decoded(model, ReFusion(**refusion_options(setting)), prompts, setting["gen_length"])
        total, num_calls = time.process_time() - started, output.num_calls
        rounds.append({**seconds, "outside": total - sum(seconds.values())})
    rounds = rounds[1:]  # the first one warms up
    shares = [one["outside"] / sum(one.values()) for one in rounds]
    per_call = {part: statistics.median(one[part] for one in rounds) / num_calls * 1e3 for part in rounds[0]}
    return {
        "share_outside": round(statistics.median(shares), 4),
        "num_calls": num_calls,
        "milliseconds_a_call": {part: round(value, 4) for part, value in per_call.items()},
    }


def main(repeats: int = 9, output: str | None = None) -> None:
    """Measure overhead.

    Args:
        repeats: How often each setting is decoded.
        output: Where to write the JSON.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    reference, model = golden_runs("clean"), golden_model("clean")
    seconds = timed(model)
    cases: dict[str, Any] = {}
    for number, setting in enumerate(reference["settings"]):
        runs = [run for run in reference["runs"] if run["setting"] == number]
        prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
        cases[f"setting {number + 1}"] = measured(model, seconds, setting, prompts, repeats)
        print(number + 1, cases[f"setting {number + 1}"], flush=True)
    mean = statistics.mean(case["share_outside"] for case in cases.values())
    summary = [summary_line("share of the time outside body and head, mean of six settings, batch 1", mean)]
    results = {"summary": summary, "mean_share_outside": round(mean, 4), "cases": cases}
    write("overhead", {"repeats": repeats}, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
