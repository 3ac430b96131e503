"""Which part of the recipe does the work: whose answers, where the masks stand, or what they learn?

usage: python experiments/refusion_pays/levers.py --questions GSM8K_TRAIN.jsonl --prompts GSM8K_TEST.jsonl@24
           [--num_questions 448] [--num_positions 150000] [--only RECIPE ...] [--work_dir DIR] [--output FILE]

SmolLM2-135M-Instruct answers the questions; every recipe trains on the same questions from the base's weights, for the
same number of positions, and all models decode the same prompts. A training resumes; what is finished is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import refusion_lit
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.modeling.load import DType
from refusion_lit.reports.results import environment

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import configs, fast_dtype, kept, precision, step_positions, train, write_json
from experiments.lossless.table import BASE, read_prompts
from experiments.refusion_pays.convert import answer
from experiments.refusion_pays.real_model import compared

HERE = Path(__file__).parent
HYBRID, WINDOWS = "--model.objective=Hybrid", "--model.objective=MaskWindows"
OF_4 = "--model.objective.init_args.window=4"
SIZES = "--model.objective.init_args.slot_sizes"
ADAPTERS = ("--model.backbone.lora.rank=16", "--model.backbone.lora.alpha=32", "--model.optimizer.init_args.lr=1e-3")
RECIPES: dict[str, tuple[str, ...]] = {
    "own answers, MaskWindows": ("own", WINDOWS),
    "own answers, Hybrid": ("own", HYBRID),
    "human answers, MaskWindows": ("human", WINDOWS),
    "human answers, Hybrid": ("human", HYBRID),
    "own answers, SoftWindows": ("own", "--model.objective=experiments.refusion_pays.soft.SoftWindows"),
    "own answers, windows of 4": ("own", WINDOWS, OF_4),
    "own answers, adapters": ("own", WINDOWS, OF_4, *ADAPTERS),
    "answers at 0.8, windows of 4": ("sampled", WINDOWS, OF_4),
    "own answers, Hybrid of 4": ("own", HYBRID, f"{SIZES}=[4]"),
    "own answers, Hybrid of 8": ("own", HYBRID, f"{SIZES}=[8]"),
}
"""Whose answers, and the options of the training beside levers.yaml."""
DECODERS = ["SelfSpeculative, one slot", "ReFusion bonus 32x1", "ReFusion mask 8x4"]
SLOTS = [*DECODERS, "ReFusion bonus 8x4", "ReFusion bonus 4x8", "ReFusion mask 4x8"]
"""What the models that were trained for one slot size are decoded with."""
MAX_NEW_TOKENS = 96


def human_answers(questions: Path, own_answers: Path, output: Path) -> Path:
    """Write the human answers to the questions that have an own answer."""
    human = read_json_lines(questions, "--questions", texts=("question", "answer"))
    rows = read_json_lines(own_answers, "answers", texts=("id", "prompt", "response", "finish_reason"))
    rows = [row for row in rows if row["finish_reason"] == "eos" and row["response"]]
    texts = [{"id": row["id"], "prompt": row["prompt"], "response": human[_number(row)]["answer"]} for row in rows]
    output.write_text("\n".join([*(json.dumps(row) for row in texts), ""]), encoding="utf-8")
    return output


def _number(row: dict[str, Any]) -> int:
    """Return the line of a question in its file."""
    return int(row["id"].removeprefix("train-"))


def one_recipe(name: str, data: dict[str, Path], prompts: str, num_positions: int, work: Path) -> dict[str, Any]:
    """Train and measure a recipe."""
    whose, *overrides = RECIPES[name]
    options = [*overrides, "--data.task.init_args.train", str(data[whose])]
    options += ["--data.task.init_args.keep", "all"] if whose == "human" else []
    options += ["--data.batch_size", "6"] if HYBRID in overrides else []  # rows, half as long as with windows
    last, figures = trained(work / name.replace(", ", "_").replace(" ", "_"), num_positions, *options)
    chosen = SLOTS if any(option.startswith(SIZES) for option in overrides) else DECODERS
    return figures | measured(last, prompts, chosen, fast_dtype(), "experiments/refusion_pays/levers.py")


def trained(folder: Path, num_positions: int, *options: str) -> tuple[Path, dict[str, Any]]:
    """Train by levers.yaml and these options for about a number of positions; return the checkpoint and its figures."""
    options = (*configs(HERE / "own_answers.yaml", HERE / "levers.yaml"), *precision(), *options)
    num_steps = round(num_positions / mean(step_positions([*options, "--trainer.max_steps", "1"])))
    started = time.perf_counter()
    steps = ["--trainer.max_steps", str(num_steps), "--trainer.val_check_interval", str(num_steps)]
    last = train(folder / "fit", *options, *steps)
    minutes = round((time.perf_counter() - started) / 60, 1)
    checkpoint = torch.load(last, weights_only=True, map_location="cpu")
    return last, {
        "num_steps": num_steps, "num_positions": checkpoint["refusion_lit_num_positions"], "minutes": minutes,
    }  # fmt: skip


def measured(model: Path, prompts: str, decoders: list[str], dtype: DType, script: str) -> dict[str, Any]:
    """Decode prompts with the base and a model on one thread; return the figures, and where they were measured."""
    torch.set_num_threads(1)
    base, other = (refusion_lit.load(source, device="cpu", dtype=dtype) for source in (BASE, model))
    chosen = read_prompts(base, *prompts.split("@"))
    return {
        "num_prompts": len(chosen), "max_new_tokens": MAX_NEW_TOKENS,
        "decoders": compared(base, other, chosen, MAX_NEW_TOKENS, decoders),
        "environment": environment(0, ["python", script]),
    }  # fmt: skip


def main() -> None:
    """Run the recipes that are not done, and gather all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", required=True, type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--prompts", required=True, metavar="FILE@NUMBER", help="to measure with, GSM8K's test.jsonl")
    parser.add_argument("--num_questions", type=int, default=448)
    parser.add_argument("--num_positions", type=int, default=150_000, help="that each training computes")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--work_dir", type=Path, default=Path("runs/refusion_pays/levers"))
    parser.add_argument("--output", type=Path, default=HERE / "levers.json")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    answers = answer(args.questions, args.num_questions, args.work_dir)
    data = {"own": answers, "human": human_answers(args.questions, answers, args.work_dir / "human.jsonl")}
    if any(RECIPES[name][0] == "sampled" for name in args.only):
        data["sampled"] = answer(args.questions, args.num_questions, args.work_dir / "sampled", temperature=0.8)
    recipes = json.loads(args.output.read_text(encoding="utf-8"))["recipes"] if args.output.exists() else {}
    for name in args.only:
        part = args.work_dir / f"{name}.json"
        recipes[name] = kept(part, one_recipe, name, data, args.prompts, args.num_positions, args.work_dir)
        ordered = {name: recipes[name] for name in RECIPES if name in recipes}
        write_json(args.output, {"num_questions": args.num_questions, "recipes": ordered})


if __name__ == "__main__":
    main()
