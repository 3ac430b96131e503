"""Which part of the recipe does the work: whose answers, where the masks stand, or what they learn?

usage: python experiments/refusion_pays/levers.py --questions GSM8K_TRAIN.jsonl --prompts GSM8K_TEST.jsonl@24
           [--num_questions 448] [--num_positions 150000] [--only NAME ...] [--dtype bfloat16]
           [--work_dir DIR] [--output FILE]

SmolLM2-135M-Instruct answers the questions; every recipe trains on the same questions from the base's weights, for the
same number of positions, and all models decode the same prompts. ``twice as long`` and ``second round`` start from the
weights of the first recipe, for as many positions again: one on the base's answers, one on those of the first recipe's
model. A training resumes; what is finished is kept. ``--only`` runs some recipes, and keeps the others' results.
``--dtype float32`` is for processors without products of 16 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import refusion_lit
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.reports.results import environment

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import command, configs, kept, step_positions, train, write_json
from experiments.lossless.table import BASE, read_prompts
from experiments.refusion_pays.convert import answer
from experiments.refusion_pays.real_model import compared

HERE = Path(__file__).parent
HYBRID, WINDOWS = "--model.objective=Hybrid", "--model.objective=MaskWindows"
FIRST = "own answers, MaskWindows"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training.

    Attributes:
        answers: ``own`` of the base, ``human``, or those of the ``start``.
        options: Beside levers.yaml.
        start: Recipe whose weights it starts from; the base's by default.
    """

    answers: str
    options: tuple[str, ...]
    start: str | None = None


_ADAPTERS = ("--model.backbone.lora.rank=16", "--model.optimizer.init_args.lr=1e-3")
RECIPES = {
    FIRST: Recipe(answers="own", options=(WINDOWS,)),
    "own answers, Hybrid": Recipe(answers="own", options=(HYBRID,)),
    "human answers, MaskWindows": Recipe(answers="human", options=(WINDOWS,)),
    "human answers, Hybrid": Recipe(answers="human", options=(HYBRID,)),
    "own answers, SoftWindows": Recipe(
        answers="own", options=("--model.objective=experiments.refusion_pays.soft.SoftWindows",)
    ),
    "own answers, MaskWindows, adapters": Recipe(answers="own", options=(WINDOWS, *_ADAPTERS)),
    "twice as long": Recipe(answers="own", options=(WINDOWS,), start=FIRST),
    "second round": Recipe(answers="start", options=(WINDOWS,), start=FIRST),
}
DECODERS = ["SelfSpeculative, one slot", "ReFusion bonus 32x1", "ReFusion mask 8x4"]
MAX_NEW_TOKENS = 96


def human_answers(questions: Path, own: Path, output: Path) -> Path:
    """Write the human answers to the questions that have an own answer."""
    human = read_json_lines(questions, "--questions", texts=("question", "answer"))
    rows = read_json_lines(own, "answers", texts=("id", "prompt"))
    texts = [{"id": row["id"], "prompt": row["prompt"], "response": human[_number(row)]["answer"]} for row in rows]
    output.write_text("\n".join([*(json.dumps(each) for each in texts), ""]), encoding="utf-8")
    return output


def _number(row: dict[str, Any]) -> int:
    """Return the line of a question in its file."""
    return int(row["id"].removeprefix("train-"))


def folder(name: str, work: Path) -> Path:
    """Return where a recipe's training lies."""
    return work / name.replace(", ", "_").replace(" ", "_")


def exported(name: str, work: Path) -> Path:
    """Return a trained model as a directory."""
    path = folder(name, work) / "exported"
    if not (path / "config.json").exists():
        last = folder(name, work) / "fit" / "checkpoints" / "last.ckpt"
        command("export", "--ckpt_path", str(last), "--output", str(path))
    return path


def one_recipe(name: str, data: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure a recipe."""
    recipe = RECIPES[name]
    options = [*configs(HERE / "own_answers.yaml", HERE / "levers.yaml"), *recipe.options]
    answers = data.get(recipe.answers)
    if recipe.start is not None:
        start = exported(recipe.start, args.work_dir)
        options += ["--model.backbone.source", str(start)]
        if answers is None:
            folder(name, args.work_dir).mkdir(exist_ok=True)
            greedy = ("SelfSpeculative", "--decoder.slot_size", "256", "--decoder.num_drafts", "3")
            own_folder = folder(name, args.work_dir)
            answers = answer(args.questions, args.num_questions, own_folder, start, greedy, args.dtype)
    options += ["--data.task.init_args.train", str(answers)]
    options += ["--trainer.precision", "32-true"] if args.dtype == "float32" else []
    options += ["--data.batch_size", "6"] if HYBRID in recipe.options else []  # rows, half as long as with windows
    num_steps = round(args.num_positions / mean(step_positions([*options, "--trainer.max_steps", "1"])))
    started = time.perf_counter()
    steps = ["--trainer.max_steps", str(num_steps), "--trainer.val_check_interval", str(num_steps)]
    last = train(folder(name, args.work_dir) / "fit", *options, *steps)
    minutes = round((time.perf_counter() - started) / 60, 1)
    torch.set_num_threads(1)
    base, model = (refusion_lit.load(source, device="cpu", dtype=args.dtype) for source in (BASE, last))
    chosen = read_prompts(base, *args.prompts.split("@"))
    found = compared(base, model, chosen, MAX_NEW_TOKENS, DECODERS)
    checkpoint = torch.load(last, weights_only=True, map_location="cpu")
    return {
        "num_steps": num_steps, "num_positions": checkpoint["refusion_lit_num_positions"], "minutes": minutes,
        "num_prompts": len(chosen), "max_new_tokens": MAX_NEW_TOKENS, "decoders": found,
        "environment": environment(0, ["python", "experiments/refusion_pays/levers.py"]),
    }  # fmt: skip


def main() -> None:
    """Run the recipes that are not done, and gather all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", required=True, type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--prompts", required=True, metavar="FILE@NUMBER", help="to measure with, GSM8K's test.jsonl")
    parser.add_argument("--num_questions", type=int, default=448)
    parser.add_argument("--num_positions", type=int, default=150_000, help="that each training computes")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products and decodes")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/refusion_pays/levers"))
    parser.add_argument("--output", type=Path, default=HERE / "levers.json")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    own = answer(args.questions, args.num_questions, args.work_dir, dtype=args.dtype)
    data = {"own": own, "human": human_answers(args.questions, own, args.work_dir / "human.jsonl")}
    found = json.loads(args.output.read_text(encoding="utf-8"))["recipes"] if args.output.exists() else {}
    for name in args.only:
        found[name] = kept(args.work_dir / f"{name}.json", one_recipe, name, data, args)
        ordered = {each: found[each] for each in RECIPES if each in found}
        write_json(args.output, {"num_questions": args.num_questions, "dtype": args.dtype, "recipes": ordered})


if __name__ == "__main__":
    main()
