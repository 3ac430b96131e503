"""Convert SmolLM2-135M-Instruct to ReFusion on its own answers, and measure.

usage: python experiments/refusion_pays/convert.py --questions GSM8K_TRAIN.jsonl --prompts GSM8K_TEST.jsonl@8
           [--num_questions 1000] [--num_rounds 3] [--max_steps N] [--work_dir DIR]

Lets the base answer the questions, and trains by windows.yaml on the answers that ended. The model that comes out
answers half as many further questions with ReFusion, and a second round trains it on these; a third round likewise
begins with the answers of the second's model. All models are measured. Each part continues where it was interrupted;
what is finished is kept. `--num_questions 64 --max_steps 4 --prompts FILE@1` in a --work_dir of its own is a trial of
minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from refusion_lit.evaluation.predictions import read_json_lines

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import command, configs, fast_dtype, precision, train
from experiments.lossless.table import BASE

HERE = Path(__file__).parent
MAX_NEW_TOKENS = 256
"""Of an answer. Longer ones are left out: seven of ten of the base's answers end within it."""

DECODER = (
    "--decoder", "ReFusion", "--decoder.slot_size", "32", "--decoder.num_serial_blocks", "8",
    "--decoder.infill", "bonus", "--decoder.num_drafts", "3",
)  # fmt: skip
"""That of the exported models, which answer from the second round on."""


def answer(
    questions: Path, num_questions: int, work_dir: Path, dtype: str | None = None, model: Path = BASE, first: int = 0,
    temperature: float = 0.0,
) -> Path:  # fmt: skip
    """Let a model answer questions, the base one token at a time; return the file of the answers.

    Args:
        questions: GSM8K's file.
        num_questions: Number of questions.
        work_dir: Where questions and answers are written.
        dtype: Of the decode; by default the one that this processor is fast in.
        model: What answers: the base, or an exported model with the decoder that its directory names.
        first: Index of the first question.
        temperature: Of the decode.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    rows = read_json_lines(questions, "--questions", texts=("question",))[first : first + num_questions]
    lines = [json.dumps({"id": f"train-{i}", "prompt": row["question"]}) for i, row in enumerate(rows, start=first)]
    prompts, answers = work_dir / "questions.jsonl", work_dir / "answers.jsonl"
    prompts.write_text("\n".join([*lines, ""]), encoding="utf-8")
    command(
        "generate", "--ckpt_path", str(model), "--dtype", dtype or fast_dtype(), "--batch_size", "64",
        "--max_new_tokens", str(MAX_NEW_TOKENS), "--prompts", str(prompts), "--output", str(answers), "--resume",
        "--temperature", str(temperature), *(("--decoder", "Autoregressive") if model == BASE else ()),
    )  # fmt: skip
    return answers


def trained(folder: Path, start: Path, data: Path, *options: str) -> Path:
    """Train a model further on answers; return the exported model's directory."""
    inputs = ("--model.backbone.source", str(start), "--data.task.init_args.train", str(data))
    checkpoint = train(folder / "fit", *options, *inputs)
    exported = folder / "exported"
    if not (exported / "config.json").exists():
        command("export", "--ckpt_path", str(checkpoint), "--output", str(exported), *DECODER)
    return exported


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions", required=True, type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--prompts", required=True, metavar="FILE@NUMBER", help="to measure with, GSM8K's test.jsonl")
    parser.add_argument("--num_questions", type=int, default=1000)
    parser.add_argument("--num_rounds", type=int, default=3, help="the first one is on the base's answers")
    parser.add_argument("--max_steps", type=int, default=None, help="of the training; for a trial")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/refusion_pays"))
    args = parser.parse_args()
    stages = [HERE / "own_answers.yaml", HERE / "windows.yaml"]
    options = precision()
    if args.max_steps is not None:  # of a trial's few answers, enough are held out to validate with
        options += ["--trainer.max_steps", str(args.max_steps), "--data.task.init_args.validation_fraction", "0.25"]
    work, questions, count = args.work_dir, args.questions, args.num_questions
    answers = answer(questions, count, work)
    model = trained(work / "windows", BASE, answers, *configs(*stages), *options)
    models = [f"windows={model}"]
    stages.append(HERE / "second_round.yaml")
    for number in range(2, args.num_rounds + 1):
        folder = work / f"round_{number}"
        answers = answer(questions, count // 2, folder, model=model, first=count + (number - 2) * (count // 2))
        model = trained(folder, model, answers, *configs(*stages), *options)
        models.append(f"round {number}={model}")
    measured = [sys.executable, HERE / "real_model.py", *models, "--prompts", args.prompts]
    subprocess.run([*measured, "--output", work / "real_model.json"], check=True)


if __name__ == "__main__":
    main()
