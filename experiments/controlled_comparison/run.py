"""Train and decode every run of the comparison, one at a time; finished runs are skipped, so it can be killed.

usage: python experiments/controlled_comparison/run.py [--work_dir DIR] [--output FILE] [--only NAME ...]
           [--tasks NAME ...] [--seeds SEED ...]

All objectives of a task compute the same number of token positions in training (``BUDGETS``): run.py builds training
batches of each objective, counts the positions that the model computes for it, and sets the number of steps from that.
Each decoder decodes the validation prompts, too: settings are chosen by these. Runs that the output has and the work
directory has not are kept.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

import refusion_lit
from refusion_lit import TextModel, decoding
from refusion_lit.decoding import Decoder
from refusion_lit.tasks import Sheet
from refusion_lit.tasks.base import Split
from refusion_lit.types import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import (
    PLACES,
    argument_parser,
    command,
    configs,
    decode_examples,
    kept,
    places,
    read_environment,
    seeds,
    step_positions,
    write_json,
)
from experiments.tasks import Latin, Walk

HERE = Path(__file__).parent
OBJECTIVES = ("hybrid", "autoregressive", "masked", "block")
TASKS = {"walk": Walk, "latin": Latin, "sheet": Sheet}
SEEDS = (0, 1, 2)
LATER = ("dual_stream", "soft_tail", "diffusion_forcing", "staggered", "sdar", "sdar_clipped", "zarya")
"""Objectives that run on ``walk`` and ``sheet`` with one seed; they came after the others."""
EXTRA = (("sheet", "block", 0, 2.0), *((task, name, 0, 1.0) for name in LATER for task in ("walk", "sheet")))
"""Single runs, with the factor of their budget: block diffusion with as many samples as the others, not positions."""
NOISES = ("block_clipped", "uniform", "editable", "editable_clipped", "diffusion_gemma")
"""Objectives with other noise, on ``walk`` and ``sheet`` with all seeds."""
BUDGETS = {"sheet": 6_000_000, "walk": 8_000_000, "latin": 8_000_000}
"""Token positions computed in each training; a doubled sequence costs up to double."""
LENGTHS = {task: yaml.safe_load((HERE / f"task_{task}.yaml").read_text())["model"]["sampling"]["max_new_tokens"]
           for task in TASKS}  # fmt: skip


def options(task: str, objective: str, seed: int) -> list[str]:
    """Return the options that fit and test share."""
    names = ("common", f"task_{task}", f"objective_{objective}")
    result = [*configs(*(HERE / f"{name}.yaml" for name in names)), *seeds(seed)]
    if objective == "masked":
        length = LENGTHS[task]
        result += ["--model.objective.init_args.pad_responses_to", str(length)]
        for tokens in (1, 2, 4, 8):
            result += [f"--model.decoders.llada_{tokens}.init_args.steps", str(length // tokens)]
    return result


def positions_a_step(args: list[str]) -> int:
    """Return the token positions that the model computes for a training batch, a mean over batches."""
    return round(mean(step_positions(args, 20)))


def run_name(task: str, objective: str, seed: int, factor: float) -> str:
    """Return the name of a run, of its directory and of its result."""
    return f"{task}_{objective}_seed{seed}" + (f"_times{factor:g}" if factor != 1 else "")


def is_run(values: dict[str, Any], task: str, objective: str, seed: int) -> bool:
    """Return whether a result belongs to the run with this task, objective and seed and the whole budget."""
    names = ("task", "objective", "seed", "budget_factor")
    return tuple(values[name] for name in names) == (task, objective, seed, 1.0)


def train(task: str, objective: str, seed: int, work: Path, factor: float = 1.0) -> tuple[Path, dict[str, float]]:
    """Train unless that is done; return the last checkpoint, and steps, positions and seconds."""
    name, shared = run_name(task, objective, seed, factor), options(task, objective, seed)
    fit = work / "runs" / name / "fit"
    trained = fit / "trained.json"  # written last: a training that was killed restarts from scratch
    positions = positions_a_step(shared)
    steps = round(factor * BUDGETS[task] / positions)
    print(f"{name}: {steps} steps of {positions} positions", flush=True)
    if not trained.exists():
        shutil.rmtree(fit, ignore_errors=True)
        start = time.perf_counter()
        command("fit", *shared, *places(fit), "--trainer.max_steps", str(steps))
        write_json(trained, {"training_seconds": time.perf_counter() - start})
    figures = {"num_steps": steps, "positions_per_step": positions, "num_positions": steps * positions}
    return fit / "checkpoints" / "last.ckpt", {**figures, **json.loads(trained.read_text())}


def measured(model: TextModel, task: str, split: Split, decoder: Decoder) -> dict[str, float]:
    """Decode the prompts of a split; return the figures."""
    examples = TASKS[task](num_train=400_000, num_validation=256, num_test=200)
    sampling = SamplingParams(max_new_tokens=LENGTHS[task])
    return decode_examples(model, examples.examples(split), examples.score, decoder, sampling)[1]


def one_run(task: str, objective: str, seed: int, work: Path, factor: float) -> dict[str, Any]:
    """Train and test one objective; return its result."""
    checkpoint, figures = train(task, objective, seed, work, factor)
    test = checkpoint.parents[2] / "test"
    shutil.rmtree(test, ignore_errors=True)
    start = time.perf_counter()
    command("test", *options(task, objective, seed), *places(test), "--ckpt_path", str(checkpoint))
    results, model = json.loads((test / "results.json").read_text()), refusion_lit.load(checkpoint)
    validation = {}
    for name, given in results["decoders"].items():
        chosen = {key: value for key, value in given.items() if key != "class"}
        validation[name] = measured(model, task, "validation", getattr(decoding, given["class"])(**chosen))
    return {
        "task": task, "objective": objective, "seed": seed, "budget_factor": factor, **figures,
        "test_seconds": time.perf_counter() - start, "decoders": results["decoders"], "results": results["results"],
        "validation": validation,
        "environment": read_environment(checkpoint.parents[1]),
    }  # fmt: skip


def main() -> None:
    """Run what is missing, and gather everything into results.json."""
    parser = argument_parser(__doc__, "runs/controlled_comparison", HERE / "results.json")
    parser.add_argument("--only", nargs="*", help="objectives to run; all by default")
    parser.add_argument("--tasks", nargs="*", default=TASKS, help="tasks to run; all by default")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="seeds to run; all by default")
    args = parser.parse_args()
    runs = [(task, objective, seed, 1.0) for task in TASKS for seed in SEEDS for objective in OBJECTIVES]
    runs += EXTRA
    runs += [(task, objective, seed, 1.0) for objective in NOISES for seed in SEEDS for task in ("walk", "sheet")]
    runs = [run for run in runs if run[0] in args.tasks and run[2] in args.seeds]
    if args.only is not None:
        runs = [run for run in runs if run[1] in args.only]
    for task, objective, seed, factor in runs:
        part = args.work_dir / f"{run_name(task, objective, seed, factor)}.json"
        kept(part, one_run, task, objective, seed, args.work_dir, factor)
    finished = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
    finished += [json.loads(path.read_text()) for path in args.work_dir.glob("*_seed*.json")]
    named = {run_name(run["task"], run["objective"], run["seed"], run["budget_factor"]): run for run in finished}
    for run in named.values():  # parts of earlier versions of this program name places, too
        run["environment"] = {name: value for name, value in run["environment"].items() if name not in PLACES}
    write_json(args.output, {"budgets": BUDGETS, "runs": [named[name] for name in sorted(named)]})


if __name__ == "__main__":
    main()
