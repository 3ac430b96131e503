"""Gather a sweep's table into one JSON, without the paths of the machine: collect_sweep.py SWEEP_DIRECTORY OUTPUT."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

sys.path.append(str(Path(__file__).parents[1]))

from experiments.common import read_environment

LOCAL = {"folder", "error", "point", "point_seconds", "seconds"}


def value(text: str) -> Any:
    """Return the value of a cell: a number as a number, a checkpoint as the name of its run."""
    if text.endswith(".ckpt"):
        return Path(text).parents[2].name
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(directory: Path, output: Path) -> None:
    """Gather the table of a sweep into one JSON, without the paths of the machine that ran it.

    Args:
        directory: The sweep's directory, with all points finished.
        output: The JSON file to write.
    """
    with (directory / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = [{k: value(v) for k, v in row.items() if k not in LOCAL} for row in csv.DictReader(file)]
    unfinished = [row for row in rows if row["status"] != "finished"]
    if unfinished:
        raise SystemExit(f"{len(unfinished)} rows of {directory} are not finished; run the sweep with --resume first")
    environments = sorted((directory / "points").glob("*/test/environment.json"))
    environments += sorted((directory / "points").glob("*/*/test/environment.json"))
    described = read_environment(environments[0].parent)
    text = json.dumps({"rows": rows, "environment": described}, indent=1)
    output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    auto_cli(main)
