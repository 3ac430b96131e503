"""Of GSM8K's test problems, how many does a model solve? Its last number counts, as SmolLM2 marks no answer.

usage: python experiments/refusion_pays/solved.py --problems GSM8K_TEST.jsonl@100 NAME=MODEL ... [--output FILE]

Each model decodes with the decoder that its directory names, greedily, in batches of 50, with 256 new tokens at most.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

import refusion_lit
from refusion_lit.reports.results import environment
from refusion_lit.tasks.gsm8k import Gsm8k, extract_answer
from refusion_lit.types import Example, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import decode_examples, write_json

SAMPLING = SamplingParams(max_new_tokens=256)


def is_right(example: Example, response: str) -> float:
    """Return 1 if the last number of a response is the reference's, else 0."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", response)
    return float(bool(numbers) and extract_answer(f"#### {numbers[-1]}") == extract_answer(example.response))


def main() -> None:
    """Decode and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--problems", required=True, metavar="FILE@NUMBER")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("solved.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    file, _, number = args.problems.partition("@")
    examples = Gsm8k(test=file).examples("test")[: int(number)]
    found = {}
    for text in args.models:
        name, _, path = text.partition("=")
        model = refusion_lit.load(path, device="cpu", dtype="bfloat16")
        decoder = model.default_decoder.fitted(SAMPLING)
        scores, figures = decode_examples(model, examples, is_right, decoder, SAMPLING)
        found[name] = {"num_solved": round(sum(scores)), "decoder": type(decoder).__name__, **figures}
        print(name, found[name], flush=True)
    write_json(args.output, {"num_problems": len(examples), "models": found, "environment": environment(0, sys.argv)})


if __name__ == "__main__":
    main()
