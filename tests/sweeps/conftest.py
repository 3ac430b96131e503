"""A fake of the command line, whose real start takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Reads its options as the real command does; the score is a function of x, which identifies the point.
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
while config.get("waits_for") and not pathlib.Path(config["waits_for"]).exists():
    time.sleep(0.05)
place.mkdir(parents=True)
if subcommand == "fit":
    (place / "checkpoints").mkdir()
    (place / "checkpoints" / "last.ckpt").write_text("weights")
else:
    last = place.with_name("fit") / "checkpoints" / "last.ckpt"
    score = config["x"] ** 2 + (options.get("ckpt_path") == "last" and last.read_text() == "weights")
    results = {"a": {"score": score, "seconds": 1e6}, "b": {"score": -score, "seconds": 2e6}}
    mismatches = {"a": [], "b": ["another attention", "another block size"]}
    environment = {"num_concurrent": int(os.environ["REFUSION_LIT_NUM_CONCURRENT"])}
    content = {"results": results, "mismatches": mismatches, "environment": environment}
    (place / "results.json").write_text(json.dumps(content))
"""


OPTIONS = {"x", "journal", "waits_for", "broken", "seed_everything", "group", "runs_dir", "ckpt_path", "data"}
"""Options of the fake, or groups of them."""


def resolve(subcommand: str, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Fake of the real parser: fills in defaults, refuses unknown options, and leaves dotted names as they are."""
    config = {**config, **options}
    for name in sorted(config):
        if name.partition(".")[0] not in OPTIONS:
            raise ValueError(f"{name} is not expected")
    return {"seed_everything": 0, "waits_for": None, **config}


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that makes a module of a source text, which other processes can import by its name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))

    def make(source: str) -> str:
        name = f"command_{len([*folder.iterdir()])}"
        (folder / f"{name}.py").write_text(source)
        return name

    return make


@pytest.fixture
def module(make_module: Callable[[str], str]) -> str:
    """Return the name of a module that stands for the command line."""
    return make_module(FAKE)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.txt"
    path.touch()
    return path
