"""Train a half-trained hybrid model on rewards, and decode it left to right and by thresholds before and after.

usage: python experiments/policy_additions/run.py [--work_dir runs/policy_additions] [--output FILE] [--seeds 0 1 2]

Finished parts are skipped, and a training resumes, so it can be killed.
"""

from __future__ import annotations

import csv
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.decoding import Decoder, ReFusion, SelfSpeculative
from refusion_lit.reports.intervals import score_difference
from refusion_lit.reports.results import environment
from refusion_lit.tasks import Additions, Task
from refusion_lit.types import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import (
    argument_parser,
    command,
    configs,
    decode_examples,
    kept,
    seeds,
    train,
    write_json,
)

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
START_STEP = 1900
TASK = Additions(max_terms=3, num_train=400_000, num_validation=500, num_test=500)
DECODERS: dict[str, Decoder] = {
    "left to right": SelfSpeculative(slot_size=8),
    "thresholds": ReFusion(slot_size=8, num_serial_blocks=2, slot_threshold=0.9, token_threshold=0.9),
}


def start_model(work: Path, step: int = START_STEP, *overlays: Path) -> Path:
    """Train a small model, and export its checkpoint of a step; return the exported model.

    Args:
        work: Where both are kept.
        step: The step, a multiple of 100.
        overlays: Configs on top of the quickstart's, whose training has 2500 steps.
    """
    exported = work / "start"
    if not exported.exists():
        run = work / "start_run" / "fit"
        path = _with_repository()
        train(run, *configs(CONFIGS / "quickstart.yaml", HERE / "start.yaml", *overlays), PYTHONPATH=path)
        checkpoint = run / "checkpoints" / f"step={step}.ckpt"
        command("export", "--ckpt_path", str(checkpoint), "--output", str(exported), PYTHONPATH=path)
    return exported


def _with_repository() -> str:
    """Return the search path with the repository, for class paths of experiments."""
    return os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))


def measured(
    model: Path, num_prompts: int, task: Task = TASK, decoders: Mapping[str, Decoder] = DECODERS, length: int = 64
) -> dict[str, Any]:
    """Decode test prompts greedily, with at most ``length`` new tokens."""
    loaded = refusion_lit.load(str(model))
    examples = list(task.examples("test"))[:num_prompts]
    by_decoder = {}
    for name, decoder in decoders.items():
        scores, figures = decode_examples(loaded, examples, task.reward, decoder, SamplingParams(max_new_tokens=length))
        by_decoder[name] = {**{key: round(value, 4) for key, value in figures.items()}, "scores": scores}
        print(model, name, {key: value for key, value in by_decoder[name].items() if key != "scores"}, flush=True)
    return by_decoder


def trained(run: Path, start: Path, seed: int, *options: str) -> tuple[Path, float]:
    """Train on rewards from the start model unless that is done; return the checkpoint and the seconds it took."""
    started = time.perf_counter()
    model = ["--model.backbone.source", str(start), "--data.tokenizer.init_args.source", str(start)]
    last = train(run, *options, *model, *seeds(seed), PYTHONPATH=_with_repository())
    return last, kept(run / "seconds.json", lambda: time.perf_counter() - started)


def curve(run: Path, names: Sequence[str], every: int = 10) -> list[dict[str, float]]:
    """Return means over groups of steps of what a training logged."""
    rows = []
    for path in sorted(run.glob("metrics*.csv")):
        with path.open(encoding="utf-8") as file:
            rows += [row for row in csv.DictReader(file) if row.get("train/reward")]
    points = []
    for first in range(0, len(rows), every):
        part = rows[first : first + every]
        means = {name: sum(float(row[f"train/{name}"] or math.nan) for row in part) / len(part) for name in names}
        points.append({"step": int(part[-1]["step"]) + 1, **{name: round(value, 5) for name, value in means.items()}})
    return points


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return each decoder's figures, and the difference in points with its paired 95 % interval over prompts."""
    differences = {}
    for name, figures in after.items():
        percent = ([100 * score for score in figures[name]["scores"]] for figures in (after, before))
        interval = score_difference(*percent)
        bounds = (interval.estimate, interval.low, interval.high)
        differences[name] = {
            **{key: value for key, value in figures.items() if key != "scores"},
            "difference_in_points": [round(bound, 1) for bound in bounds],
        }
    return differences


def average(measurements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds of figures and of each prompt's scores."""
    means: dict[str, Any] = {}
    for name, first in measurements[0].items():
        rows = [figures[name] for figures in measurements]
        means[name] = {key: round(sum(row[key] for row in rows) / len(rows), 4) for key in first if key != "scores"}
        means[name]["scores"] = [
            sum(scores) / len(rows) for scores in zip(*[row["scores"] for row in rows], strict=True)
        ]
    return means


LOGGED = ("reward", "length", "distinct_answers", "equal_groups", "entropy", "engine_kl", "tokens_per_forward",
          "rollout_seconds", "update_seconds")  # fmt: skip


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/policy_additions", HERE / "results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_prompts", type=int, default=500)
    args = parser.parse_args()
    start = start_model(args.work_dir)
    before = kept(args.work_dir / "before.json", measured, start, args.num_prompts)
    results: dict[str, Any] = {}
    measurements = []
    for seed in args.seeds:
        run = args.work_dir / f"seed{seed}" / "fit"
        last, seconds = trained(run, start, seed, *configs(CONFIGS / "policy.yaml", HERE / "policy.yaml"))
        after = kept(args.work_dir / f"after{seed}.json", measured, last, args.num_prompts)
        results[str(seed)] = {"seconds": round(seconds), "after": compared(before, after), "curve": curve(run, LOGGED)}
        written = {name: {k: v for k, v in figures.items() if k != "scores"} for name, figures in before.items()}
        config = {"start_step": START_STEP, "num_prompts": args.num_prompts, "seeds": list(results)}
        about = environment(0, ["python", "experiments/policy_additions/run.py"])
        measurements.append(after)
        record = {"before": written, "results": results, "mean": compared(before, average(measurements))}
        write_json(args.output, {"config": config, **record, "environment": about})


if __name__ == "__main__":
    main()
