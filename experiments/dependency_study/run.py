"""How fast does the dependency between hidden tokens decay with their distance, in a trained masked model?

usage: python experiments/dependency_study/run.py NAME=CHECKPOINT[:TASK] ... [--num_samples N] [--device cuda]

CHECKPOINT is a checkpoint, a Hugging Face directory or a hub id; TASK one of the generated tasks (Sheet, Walk, ...) or
a JSONL file of {"query", "response"} lines. Writes results.json and dependency.png beside this file, or into --output.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

import refusion_lit
from refusion_lit import tasks
from refusion_lit.data.examples import encode_example
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.reports.results import environment
from refusion_lit.tasks import Example

sys.path.append(str(Path(__file__).parents[2]))

from experiments.tasks import Latin, Walk

HERE = Path(__file__).parent


def samples(model: refusion_lit.TextModel, source: str, count: int) -> list[tuple[list[int], list[int]]]:
    """Return the first encoded validation examples of a task, or the first lines of a file."""
    if source.endswith(".jsonl"):
        lines = read_json_lines(source, texts=("query", "response"))[:count]
        examples = [Example(id=str(i), query=x["query"], response=x["response"]) for i, x in enumerate(lines)]
    else:
        kinds = {**vars(tasks), "Latin": Latin, "Walk": Walk}
        validation = kinds[source](num_validation=count).examples("validation")
        examples = [validation[i] for i in range(count)]
    encoded = [encode_example(model.tokenizer, example, model.prompt_template) for example in examples]
    return [(list(example.prompt_ids), list(example.response_ids)) for example in encoded]


def main() -> None:
    """Measure every model and draw all curves."""
    from dependency import dependency_curve  # in this folder; `nox -s figures` imports this module from elsewhere

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--num_samples", type=int, default=200)
    parser.add_argument("--max_distance", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for results.json and dependency.png")
    args = parser.parse_args()
    curves: dict[str, Any] = {}
    for given in args.models:
        name, _, rest = given.partition("=")
        checkpoint, _, task = rest.rpartition(":")
        model = refusion_lit.load(checkpoint, device=args.device)
        curve = dependency_curve(
            model.backbone, samples(model, task, args.num_samples), max_distance=args.max_distance, num_targets=4
        )
        curves[name] = {**curve.__dict__, "task": task}
        print(name, [f"{d}: {kl:.3f}" for d, kl in zip(curve.distances, curve.kl, strict=True)])
    result = {"num_samples": args.num_samples, "num_targets": 4, "seed": 0, "curves": curves}
    result["environment"] = environment(0, sys.argv)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(curves, args.output / "dependency.png")


def plot(curves: dict[str, Any], path: Path) -> None:
    """Draw mean KL over the distance's absolute value, pairs of both signs together."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, curve in curves.items():
        by_distance: dict[int, list[float]] = {}
        for distance, kl, count in zip(curve["distances"], curve["kl"], curve["num_pairs"], strict=True):
            total = by_distance.setdefault(abs(distance), [0.0, 0.0])
            total[0] += kl * count
            total[1] += count
        points = sorted(by_distance.items())
        axes.plot([d for d, _ in points], [total / count for _, (total, count) in points], marker="o", label=name)
    axes.set_xlabel("distance between the revealed and the predicted token")
    axes.set_ylabel("mean KL of the prediction after and before, nats")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
