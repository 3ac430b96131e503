"""Measure the speeds of the kinds of noise: the models of one seed decode the same test prompts in turns, one thread.

usage: python experiments/controlled_comparison/speeds.py [--work_dir DIR] [--output FILE] [--seed SEED]

Each model is decoded with the setting that plot.py shows for its noise, which validation prompts chose. Run it after
run.py, with nothing beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import refusion_lit
from refusion_lit import decoding
from refusion_lit.evaluation.latency import Entrant, measure_latency, summarize
from refusion_lit.reports.results import environment
from refusion_lit.types import LatencyOptions, Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, write_json
from experiments.controlled_comparison import run
from experiments.controlled_comparison.plot import NEXT_TOKEN, NOISES, choose_setting

HERE = Path(__file__).parent
OPTIONS = LatencyOptions(num_prompts=64, batch_sizes=(1, 16, 64), min_batches=8)


def entrants(task: str, seed: int, runs: list[dict[str, Any]], work: Path) -> dict[str, Entrant]:
    """Return the model and the decoder of every kind of noise that has been trained on a task."""
    examples = run.TASKS[task](num_train=400_000, num_validation=256, num_test=200).examples("test")
    sampling = SamplingParams(max_new_tokens=run.LENGTHS[task])
    result = {}
    for label, objective, settings in NOISES:
        checkpoint = work / "runs" / run.run_name(task, objective, seed, 1.0) / "fit" / "checkpoints" / "last.ckpt"
        name = choose_setting(runs, task, objective, settings)
        if name is None or not checkpoint.exists():
            continue
        [trained] = [values for values in runs if run.is_run(values, task, objective, seed)]
        options = {**trained["decoders"][name]}
        decoder = getattr(decoding, options.pop("class"))(**options)
        model = refusion_lit.load(checkpoint)
        prompts = [Prompt(token_ids=tuple(model.encode(example.query)), id=example.id) for example in examples]
        result[label] = Entrant(model=model, decoder=decoder, sampling=sampling, prompts=prompts)
    return result


def main() -> None:
    """Measure all tasks and write the result."""
    parser = argument_parser(__doc__, "runs/controlled_comparison", HERE / "speeds.json")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads((HERE / "results.json").read_text())["runs"]
    described = environment(args.seed, ["speeds.py"])
    tasks = {}
    for task in ("sheet", "walk"):
        timings = measure_latency(entrants(task, args.seed, runs, args.work_dir), OPTIONS)
        tasks[task] = summarize(timings, NEXT_TOKEN)["decoders"]
        print(task, {label: values["1"]["times_baseline"] for label, values in tasks[task].items()}, flush=True)
    write_json(args.output, {"seed": args.seed, "tasks": tasks, "environment": described})


if __name__ == "__main__":
    main()
