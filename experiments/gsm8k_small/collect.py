"""Gather the result of this experiment from three runs: collect.py VALIDATE_RUN FIT_RUN PREDICT_RUN."""

import csv
import json
import sys
from pathlib import Path

from jsonargparse import auto_cli

from refusion_lit.evaluation.predictions import read_json_lines

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import read_environment


def validation_losses(run: Path) -> list[dict[str, float]]:
    """Return the validation losses that a run has logged."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/loss")]
    names = ("val/loss", "val/ar", "val/mdm")
    return [{"step": int(row["step"]) + 1, **{name: float(row[name]) for name in names}} for row in rows]


def main(untrained: Path, fit: Path, predict: Path) -> None:
    """Write results.json from three runs.

    Args:
        untrained: Directory of the run of ``validate`` on the untrained model.
        fit: Directory of the run of ``fit``.
        predict: Directory of the run of ``predict``.
    """
    lines = read_json_lines(predict / "predictions.jsonl")
    start = validation_losses(untrained)[0] | {"step": 0}
    shown = ("id", "prompt", "response", "reference", "num_forwards")
    result = {
        "validation": [start, *validation_losses(fit)],
        "num_predictions": len(lines),
        "exact_match": sum(line["score"] for line in lines) / len(lines),
        "tokens_per_forward": sum(line["num_tokens"] for line in lines) / sum(line["num_forwards"] for line in lines),
        "samples": [{name: line[name] for name in shown} for line in lines[:10]],
        "environment": read_environment(fit),
    }
    target = Path(__file__).parent / "results.json"
    target.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    auto_cli(main)
