"""Of GSM8K's test problems, how many does a model solve, and how many of its equations hold?

The last number counts as the answer, as SmolLM2 marks none. It solves too few problems to tell models apart; equations
such as ``48 / 2 = 24`` are many.

usage: python experiments/refusion_pays/solved.py --problems GSM8K_TEST.jsonl@200 NAME=MODEL ... [--output FILE]

Each model decodes with the decoder that its directory names, greedily, in batches of 50, with 256 new tokens at most.
Models that stand in the output stay there, if it is of as many problems.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import refusion_lit
from refusion_lit.decoding import Generation, GenerationCallback
from refusion_lit.reports.intervals import Interval, ratio_difference, ratio_interval
from refusion_lit.reports.results import environment
from refusion_lit.tasks import Example
from refusion_lit.tasks.gsm8k import Gsm8k, extract_answer
from refusion_lit.types import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import decode_examples, write_json
from experiments.policy_real.rewards import count_equations

SAMPLING = SamplingParams(max_new_tokens=256)


def is_right(example: Example, response: str) -> float:
    """Return 1 if the last number of a response is the reference's, else 0."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", response)
    return float(bool(numbers) and extract_answer(f"#### {numbers[-1]}") == extract_answer(example.response))


class Answers(GenerationCallback):
    """Keeps each prompt's answer."""

    def __init__(self) -> None:
        self.rows: dict[int, Generation] = {}

    def on_finished(self, index: int, generation: Generation) -> None:
        """Keep an answer."""
        self.rows[index] = generation


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
    known = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    models = known.get("models", {}) if known.get("num_problems") == len(examples) else {}
    for text in args.models:
        name, _, path = text.partition("=")
        model = refusion_lit.load(path, device="cpu", dtype="bfloat16")
        decoder = model.default_decoder.adapt_to(SAMPLING)
        answers = Answers()
        scores, figures = decode_examples(model, examples, is_right, decoder, SAMPLING, [answers])
        rows = [answers.rows[i] for i in range(len(examples))]
        models[name] = {
            "num_solved": round(sum(scores)), "num_ended": sum(row.finish_reason == "eos" for row in rows),
            "equations": " ".join("{}/{}".format(*count_equations(row.text)) for row in rows),  # right/all
            "decoder": type(decoder).__name__, **figures, "environment": environment(0, sys.argv),
        }  # fmt: skip
        print(name, right_share(models[name]), flush=True)
        write_json(args.output, {"num_problems": len(examples), "models": models})


def right_share(model: dict[str, Any], other: dict[str, Any] | None = None) -> Interval:
    """Return the share of a model's equations that hold, in percent; with another model's, less its share in points."""
    return ratio_interval(*_counts(model)) if other is None else ratio_difference(_counts(model), _counts(other))


def num_equations(model: dict[str, Any]) -> list[tuple[int, int]]:
    """Return how many of each answer's equations hold, and how many it has."""
    pairs = (solved.split("/") for solved in model["equations"].split())
    return [(int(right), int(every)) for right, every in pairs]


def _counts(model: dict[str, Any]) -> tuple[list[float], list[float]]:
    counts = num_equations(model)
    return [100.0 * right for right, _ in counts], [float(every) for _, every in counts]


if __name__ == "__main__":
    main()
