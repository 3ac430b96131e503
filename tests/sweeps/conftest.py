"""A child command that stands for the real one, whose start costs seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# Reads the options as the real command does; its score is a function of x, so that results can be told apart.
FAKE = """
import json, os, pathlib, sys, time
import yaml
subcommand, *rest = sys.argv[1:]
options = dict(item[2:].split("=", 1) for item in rest)
config = yaml.safe_load(pathlib.Path(options["config"]).read_text())
place = pathlib.Path(options["runs_dir"], options["run_name"], options["run_version"])
with open(config["journal"], "a") as journal:
    journal.write(f"{subcommand} {config['x']} {os.getpid()}\\n")
print("working on", config["x"])
if config.get("broken") == config["x"]:
    sys.exit("x is broken")
time.sleep(config.get("seconds", 0))
place.mkdir(parents=True)
if subcommand == "fit":
    (place / "checkpoints").mkdir()
    (place / "checkpoints" / "last.ckpt").write_text("weights")
else:
    score = config["x"] ** 2 + ("ckpt_path" in options and pathlib.Path(options["ckpt_path"]).read_text() == "weights")
    (place / "results.json").write_text(json.dumps({"results": {"a": {"score": score}, "b": {"score": -score}}}))
"""


def resolve(subcommand: str, config: dict[str, Any]) -> dict[str, Any]:
    """Stands for the real parser: fills in a default, refuses an unknown option."""
    if unknown := config.keys() - {"x", "journal", "seconds", "broken", "seed_everything", "group", "runs_dir"}:
        raise ValueError(f"{sorted(unknown)[0]} is not expected")
    return {"seed_everything": 0, "seconds": 0, **config}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return [sys.executable, str(path)]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.txt"
    path.touch()
    return path
