"""Run benchmarks through the lm-evaluation-harness and put the figures beside the published ones.

usage: python experiments/main_results/run.py SETTINGS.yaml --ckpt_path MODEL --output FOLDER

Each benchmark is a ``refusion-lit evaluate`` of its own; one whose result lies in FOLDER is not run again. Writes
``results.json`` and ``table.md`` there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.cli.environment import environment

HERE = Path(__file__).parent


def command(options: Mapping[str, Any], decoder: Mapping[str, Any], checkpoint: str, output: Path) -> list[str]:
    """Return the command that evaluates one benchmark."""
    result = [sys.executable, "-m", "refusion_lit.cli", "evaluate", f"--ckpt_path={checkpoint}", f"--output={output}"]
    result += ["--decoder=ReFusion", *(f"--decoder.{name}={value}" for name, value in decoder.items())]
    return [*result, *(f"--{k}={json.dumps(v) if isinstance(v, (list, dict)) else v}" for k, v in options.items())]


def score(result: Mapping[str, Any]) -> float:
    """Return the first metric of a benchmark in percent: the harness lists a task's main metric first."""
    values = next(iter(result["results"].values()))
    return 100 * next(v for k, v in values.items() if "," in k and "stderr" not in k and isinstance(v, (int, float)))


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table: published models by benchmark, then this run."""
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    names = published["benchmarks"]
    own = [name for name in found if name not in names]
    lines = ["| model | " + " | ".join([*names, *own]) + " |", "|---" * (1 + len(names) + len(own)) + "|"]
    for model, pairs in published["models"].items():
        cells = [f"{accuracy:.2f} / {speed:.2f}" for accuracy, speed in pairs]
        lines.append("| " + " | ".join([f"{model} (published)", *cells, *["" for _ in own]]) + " |")
    cells = [_cell(found.get(name)) for name in (*names, *own)]
    lines.append("| " + " | ".join(["this run", *cells]) + " |")
    return "\n".join(lines) + "\n\nScore in percent / tokens per second. An empty cell was not run.\n"


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    return f"{score(result):.2f} / {result['throughput']['tokens_per_second']:.2f}"


def main() -> None:
    """Run what is missing and gather."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", type=Path)
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    settings = yaml.safe_load(args.settings.read_text(encoding="utf-8"))
    args.output.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, values in settings["benchmarks"].items():
        target = args.output / f"{name.replace(' ', '_')}.json"
        options = {**settings["common"], **{k: v for k, v in values.items() if k != "decoder"}}
        if not target.exists():
            subprocess.run(command(options, values["decoder"], args.ckpt_path, target), check=True)
        found[name] = json.loads(target.read_text(encoding="utf-8"))
    summary = {"settings": settings, "results": found, "environment": environment(0, sys.argv)}
    (args.output / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (args.output / "table.md").write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
