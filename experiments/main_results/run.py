"""Run benchmarks and put the figures beside the published ones.

usage: python experiments/main_results/run.py SETTINGS.yaml --ckpt_path MODEL --output FOLDER [--include_path FOLDER]

A benchmark is a ``refusion-lit evaluate`` of its own (the lm-evaluation-harness), or, where programs are scored, a
``refusion-lit test`` of one of this project's tasks. One whose result lies in FOLDER is not run again. Writes
``results.json`` and ``table.md`` there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.reports.results import environment

HERE = Path(__file__).parent
CLI = [sys.executable, "-m", "refusion_lit.cli"]


def options(values: Mapping[str, Any]) -> list[str]:
    """Return values as options of the command line."""
    return [f"--{k}={json.dumps(v) if isinstance(v, (list, dict, bool)) else v}" for k, v in values.items()]


def by_harness(values: Mapping[str, Any], common: Mapping[str, Any], checkpoint: str, target: Path) -> dict[str, Any]:
    """Evaluate one benchmark with the harness, which lists a task's main metric first."""
    settings = {**common, "tasks": values["tasks"], "ckpt_path": checkpoint, "output": str(target)}
    decoder = ["--decoder=ReFusion", *options({f"decoder.{k}": v for k, v in values["decoder"].items()})]
    subprocess.run([*CLI, "evaluate", *options(settings), *decoder], check=True)
    record = json.loads(target.read_text(encoding="utf-8"))
    (task,) = values["tasks"]
    metrics = {k: v for k, v in record["results"][task].items() if "," in k and "stderr" not in k}
    metric, score = next(iter(metrics.items()))
    throughput = record["throughput"]
    # A group of tasks (MATH, MMLU-Pro) has a figure a member.
    tokens, seconds = (sum(member[name] for member in throughput.values()) for name in ("num_tokens", "seconds"))
    forwards = sum(member["num_forwards"] for member in throughput.values())
    return {
        "score": score,
        "metric": f"{task}: {metric}",
        "tokens_per_second": tokens / seconds,
        "tokens_per_forward": tokens / forwards,
    }


def by_test(values: Mapping[str, Any], checkpoint: str, output: Path, name: str) -> dict[str, Any]:
    """Decode and score one of this project's tasks; programs run in the sandbox."""
    decoder = {f"model.decoders.refusion.init_args.{k}": v for k, v in values["decoder"].items()}
    settings = {"ckpt_path": checkpoint, "runs_dir": output, "run_name": name, "run_version": "test"}
    base = [f"--config={HERE.parent / 'base_full.yaml'}", "--model.decoders.refusion=ReFusion"]
    native = {**values["native"], "data.task.allow_code_execution": True}
    subprocess.run([*CLI, "test", *base, *options({**settings, **native, **decoder})], check=True)
    figures = json.loads((output / name / "test" / "results.json").read_text(encoding="utf-8"))["results"]["refusion"]
    kept = ("score", "tokens_per_second", "tokens_per_forward")
    return {"metric": f"{values['native']['data.task']}: pass@1", **{key: figures[key] for key in kept}}


def table(results: Mapping[str, Mapping[str, Any]], published: Mapping[str, Any]) -> str:
    """Return a Markdown table of published models and this run by benchmark, and one of this run's other tasks."""
    names = published["benchmarks"]
    others = {name: result for name, result in results.items() if name not in names}
    rows = [["model", *names], ["---"] * (1 + len(names))]
    rows += [
        [f"{model} (published)", *(f"{accuracy:.2f} / {speed:.2f}" for accuracy, speed in pairs)]
        for model, pairs in published["models"].items()
    ]
    if len(others) < len(results):
        rows.append(["this run", *(_cell(results.get(name)) for name in names)])
    note = "Score in percent / tokens per second. The published rows are the paper's, at batch size 1.\n"
    lines = [*map(_line, rows), "", note]
    if others:
        about = (
            "This run: a model of 308 thousand parameters on 200 prompts of additions, by these settings. "
            "Score in percent, tokens per forward pass."
        )
        lines.append(f"{about}\n")
        cells = [f"{100 * result['score']:.1f}, {result['tokens_per_forward']:.1f}" for result in others.values()]
        lines += map(_line, [list(others), ["---"] * len(others), cells])
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(result: Mapping[str, Any] | None) -> str:
    return f"{100 * result['score']:.2f} / {result['tokens_per_second']:.2f}" if result else ""


def main() -> None:
    """Run what is missing and gather."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", type=Path)
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--output", type=Path, required=True)
    text = "folder of task files, for example the released repository's, which replace the harness's of the same name"
    parser.add_argument("--include_path", default=None, help=text)
    args = parser.parse_args()
    settings = yaml.safe_load(args.settings.read_text(encoding="utf-8"))
    if args.include_path is not None:
        settings["common"]["include_path"] = args.include_path
    args.output.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, values in settings["benchmarks"].items():
        plain = name.replace(" ", "_")
        done = args.output / f"{plain}.done.json"
        if not done.exists():
            if "native" in values:
                result = by_test(values, args.ckpt_path, args.output, plain)
            else:
                result = by_harness(values, settings["common"], args.ckpt_path, args.output / f"{plain}.json")
            done.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        results[name] = json.loads(done.read_text(encoding="utf-8"))
    summary = {"settings": settings, "results": results, "environment": environment(0, sys.argv)}
    (args.output / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    (args.output / "table.md").write_text(table(results, published), encoding="utf-8")


if __name__ == "__main__":
    main()
