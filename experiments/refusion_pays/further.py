"""What does a further training add: on the same answers, on the model's own, or on the states that its decoder saw?

usage: python experiments/refusion_pays/further.py --questions GSM8K_TRAIN.jsonl --prompts GSM8K_TEST.jsonl@24
           [--num_questions 288] [--num_decoded 224] [--num_positions 90000] [--only NAME ...] [--dtype float32]
           [--work_dir DIR] [--output FILE]

``first`` trains SmolLM2-135M-Instruct in windows on its own answers. Three trainings start from its model: on these
answers again (``twice as long``), and on what it answers itself with ReFusion, in windows (``second round``) and in the
states that the decoder went through (``trajectories``). All compute the same number of positions. A training resumes;
what is finished is kept. ``--only`` runs some.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.contrib.rl.trajectory import TrajectoryRecorder
from refusion_lit.data.encoding import encode_text
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.modeling.load import DType
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import command, kept, write_json
from experiments.lossless.table import BASE
from experiments.refusion_pays.convert import MAX_NEW_TOKENS, answer
from experiments.refusion_pays.levers import DECODERS, WINDOWS, measured, trained
from experiments.refusion_pays.real_model import decoders
from experiments.refusion_pays.recorded import write_states

HERE = Path(__file__).parent
TEACHER = "ReFusion bonus 8x4"
OBJECTIVE = "--model.objective"
STATES = (
    f"{OBJECTIVE}=experiments.refusion_pays.recorded.RecordedStates", f"{OBJECTIVE}.slot_sizes=[8]",
    "--data.pack_length=null", "--data.batch_size=6",
)  # fmt: skip
"""A row is a sample: a state is of one decode."""
RECIPES: dict[str, tuple[str, ...]] = {
    "first": (WINDOWS,),
    "twice as long": (WINDOWS,),
    "second round": (WINDOWS,),
    "trajectories": STATES,
}
"""Options of a training."""
OWN = ("second round", "trajectories")
"""Recipes on the first model's answers."""


def decoded(model: Path, questions: Path, num_questions: int, work: Path, dtype: DType) -> dict[str, Any]:
    """Let ReFusion answer questions; keep the answers that ended, and the states of all. Returns counts."""
    loaded = refusion_lit.load(model, device="cpu", dtype=dtype)
    rows = read_json_lines(questions, "--questions", texts=("question",))[:num_questions]
    prompts = [Prompt(token_ids=tuple(loaded.encode(row["question"])), id=f"train-{i}") for i, row in enumerate(rows)]
    decoder = decoders(MAX_NEW_TOKENS)[TEACHER]
    recorder = TrajectoryRecorder(decoder)
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    generations = loaded.decode(prompts, decoder, sampling, batch_size=32, callbacks=[recorder]).rows
    write_states(work / "states.jsonl", recorder.trajectories.values())
    ended = [
        {"id": prompt.id, "prompt": row["question"], "response": generation.text}
        for prompt, row, generation in zip(prompts, rows, generations, strict=True)
        if generation.finish_reason == "eos" and _reads_back(loaded, generation.text, generation.token_ids)
    ]
    (work / "ended.jsonl").write_text("\n".join([*map(json.dumps, ended), ""]), encoding="utf-8")
    return {
        "num_decoded": len(generations), "num_ended": sum(row.finish_reason == "eos" for row in generations),
        "num_trained_on": len(ended),
        "tokens_per_forward": round(
            sum(row.num_tokens for row in generations) / sum(row.num_forwards for row in generations), 3
        ),
    }  # fmt: skip


def _reads_back(model: refusion_lit.TextModel, text: str, token_ids: list[int]) -> bool:
    """Return whether the tokenizer makes the same tokens of a text, as a recorded decode needs."""
    return encode_text(model.tokenizer, text) == token_ids[:-1]


def exported(run: Path) -> Path:
    """Return a trained model as a directory."""
    path = run / "exported"
    if not (path / "config.json").exists():
        command("export", "--ckpt_path", str(run / "fit" / "checkpoints" / "last.ckpt"), "--output", str(path))
    return path


def one_recipe(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure a recipe."""
    work, options = args.work_dir, [*RECIPES[name], "--trainer.precision=32-true"]
    figures: dict[str, Any] = {}
    data = answer(args.questions, args.num_questions, work, args.dtype)
    start = exported(work / "first") if name != "first" else BASE
    options += ["--model.backbone.source", str(start)]
    if name in OWN:
        folder = work / "decoded"
        folder.mkdir(exist_ok=True)
        made = (start, args.questions, args.num_decoded, folder, args.dtype)
        figures["answers"] = kept(folder / "counts.json", decoded, *made)
        data = folder / "ended.jsonl"
        options += ["--data.task.init_args.keep", "all"]
    options += [f"{OBJECTIVE}.record", str(work / "decoded" / "states.jsonl")] if name == "trajectories" else []
    options += ["--data.task.init_args.train", str(data)]
    last, training = trained(work / name.replace(" ", "_"), args.num_positions, *options)
    script = "experiments/refusion_pays/further.py"
    return figures | training | measured(last, args.prompts, [*DECODERS, TEACHER], args.dtype, script)


def main() -> None:
    """Run the recipes that are not done, and gather all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", required=True, type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--prompts", required=True, metavar="FILE@NUMBER", help="to measure with, GSM8K's test.jsonl")
    parser.add_argument("--num_questions", type=int, default=288, help="that the base answers")
    parser.add_argument("--num_decoded", type=int, default=224, help="of them that the first model answers")
    parser.add_argument("--num_positions", type=int, default=90_000, help="that each training computes")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="of the decodes")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/refusion_pays/further"))
    parser.add_argument("--output", type=Path, default=HERE / "further.json")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    recipes = json.loads(args.output.read_text(encoding="utf-8"))["recipes"] if args.output.exists() else {}
    for name in args.only:
        recipes[name] = kept(args.work_dir / f"{name}.json", one_recipe, name, args)
        ordered = {name: recipes[name] for name in RECIPES if name in recipes}
        write_json(args.output, {"num_questions": args.num_questions, "dtype": args.dtype, "recipes": ordered})


if __name__ == "__main__":
    main()
