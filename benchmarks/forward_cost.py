"""Is the measured cost of a forward as good as the best fixed one? Tokens a second by ``forward_cost`` and batch size.

usage: python -m benchmarks.forward_cost [--repeats 5] [--batch_sizes '[1, 4, 16, 64]'] [--smollm2 true]
       [--num_context 2048]

ReFusion on the small trained model of the reference outputs; with ``smollm2``, SelfSpeculative on SmolLM2-135M with
the drafter of experiments/lossless (``nox -s real_model -- fetch`` makes runs/smollm2/base). Rounds are interleaved
in one process; seconds are processor time of this process (one thread). Texts do not depend on the option.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any

import torch
from benchmarks.batches import prompts_of
from benchmarks.common import ROOT, Work, aim, golden_model, golden_runs, interleaved, write
from benchmarks.peers import ours
from jsonargparse import auto_cli

import refusion_lit
from refusion_lit.decoding import Decoder, ReFusion, SelfSpeculative
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import Prompt
from refusion_lit.utils.files import read_json_lines

COSTS: tuple[Any, ...] = ("measure", 0, 8, 32, 128)
COUNTS = ("num_forwards", "num_calls", "num_positions")
QUESTIONS = ROOT / "experiments" / "lossless" / "own.jsonl"


def main(
    repeats: int = 5,
    threads: int = 1,
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64),
    smollm2: bool = False,
    num_context: int = 0,
    output: str | None = None,
) -> None:
    """Measure.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of torch.
        batch_sizes: Prompts decoded at the same time.
        smollm2: Measure SmolLM2 instead of the small model.
        num_context: Tokens before each prompt of SmolLM2, the same ones: computed once a decode.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started, name = time.perf_counter(), "forward_cost_smollm2" if smollm2 else "forward_cost"
    name += f"_context_{num_context}" if num_context else ""
    model, decoder, prompts, num_tokens = _smollm2(num_context) if smollm2 else _small()
    cases: dict[str, dict[str, Any]] = {}
    aims = []
    for batch_size in batch_sizes:
        some = prompts(batch_size)
        works: dict[str, Work] = {
            str(cost): ours(model, replace(decoder, forward_cost=cost), some, num_tokens, batch_size)  # type: ignore[call-arg]
            for cost in COSTS
        }
        interleaved(works, repeats, clock=time.process_time)
        assert len({work.outcome["text"] for work in works.values()}) == 1, "texts differ"
        rates = _rates(works)
        best = max(rate for name, rate in rates.items() if name != "measure")
        what = f"{name}: measure over the best fixed cost, batch {batch_size}"
        aims.append(aim(what, rates["measure"] / best, 0.97, at_least=True))
        cases[str(batch_size)] = {"tokens_per_second": rates, "runs": {n: work.summary() for n, work in works.items()}}
        print(batch_size, rates, flush=True)
    config = {
        "repeats": repeats,
        "threads": threads,
        "num_tokens": num_tokens,
        "num_context": num_context,
        "costs": COSTS,
        "decoder": repr(decoder),
    }
    results = {"cases": cases, "measured": model.forward_costs, "aims": aims}
    write(name, config, results, output=output, seconds=time.perf_counter() - started, seed=0)


def _rates(works: dict[str, Work]) -> dict[str, float]:
    """Return tokens a second; fixed costs that lead to the same forwards share one rate, or the luckiest would win."""
    counts = {name: tuple(work.outcome[key] for key in COUNTS) for name, work in works.items()}
    rates = {}
    for name, work in works.items():
        alike = [name] if name == "measure" else [n for n in works if n != "measure" and counts[n] == counts[name]]
        seconds = statistics.median(second for other in alike for second in works[other].seconds)
        rates[name] = round(work.outcome["num_tokens"] / seconds, 1)
    return rates


def _small() -> tuple[Backbone, Decoder, Callable[[int], list[Prompt]], int]:
    setting = golden_runs("clean")["settings"][0]
    return (
        golden_model("clean"),
        ReFusion(**refusion_options(setting)),
        lambda size: prompts_of(max(size, 16)),
        setting["gen_length"],
    )


def _smollm2(num_context: int) -> tuple[Backbone, Decoder, Callable[[int], list[Prompt]], int]:
    model = refusion_lit.load(ROOT / "runs" / "smollm2" / "base", draft=ROOT / "experiments" / "lossless" / "drafter")
    texts = [model.encode(row["prompt"]) for row in read_json_lines(QUESTIONS)]
    context = list(islice(cycle(chain.from_iterable(texts)), num_context))

    def prompts(batch_size: int) -> list[Prompt]:
        number = max(batch_size, len(texts))  # a batch of as many is no faster by forwards that some rows save
        return [Prompt(token_ids=(*context, *texts[i % len(texts)]), id=str(i)) for i in range(number)]

    return model.backbone, SelfSpeculative(), prompts, 32


if __name__ == "__main__":
    auto_cli(main)
