"""Runs one point: its commands one after another, then its outcome. ``python -m refusion_lit.sweeps.worker FOLDER``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from refusion_lit.sweeps.files import LOG, OUTCOME, POINT, read_json, tail, write_json

# What a launcher of an outer run may have set, which the point's own run must not take for its own.
_FOREIGN = ("REFUSION_LIT_RUN_VERSION", "LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK")


def run_point(folder: str) -> bool:
    """Run a point and write ``outcome.json``, the last thing that happens.

    Args:
        folder: The point's folder, with its ``point.json``.

    Returns:
        Whether it finished.
    """
    place = Path(folder)
    point = read_json(place / POINT)
    for subcommand in point["commands"]:
        shutil.rmtree(place / subcommand, ignore_errors=True)
    start = time.monotonic()
    error = None
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    with (place / LOG).open("wb") as log:
        for subcommand, command in point["commands"].items():
            arguments = list(command)
            if subcommand == "test" and "fit" in point["commands"]:
                try:
                    arguments.append(f"--ckpt_path={find_checkpoint(place / 'fit', point['test_checkpoint'])}")
                except ValueError as missing:
                    error = str(missing)
                    break
            done = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
            )
            if done.returncode:
                error = f"{subcommand} ended with exit code {done.returncode}:\n{tail(place / LOG)}"
                break
    results = read_json(place / "test" / "results.json")
    if error is None and not isinstance(results, dict):
        error = "test wrote no results.json"
    seconds = time.monotonic() - start
    if error is not None:
        write_json(place / OUTCOME, {"status": "failed", "seconds": seconds, "error": error})
        return False
    write_json(place / OUTCOME, {"status": "finished", "seconds": seconds, "results": results["results"]})
    return True


def find_checkpoint(folder: Path, which: str) -> Path:
    """Return the checkpoint that a fit left.

    Args:
        folder: The fit's directory.
        which: ``last``, or ``best`` by the monitored value of the run's ModelCheckpoint.

    Raises:
        ValueError: If there is none.
    """
    directory = folder / "checkpoints"
    files = sorted(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"fit left no checkpoint in {directory}; let trainer.callbacks have a ModelCheckpoint.")
    newest = next((path for path in files if path.name == "last.ckpt"), files[-1])
    if which == "last":
        return newest
    import torch  # costs seconds: only where it is needed

    states = torch.load(newest, map_location="cpu", weights_only=True).get("callbacks", {})
    for name, state in states.items():
        if "ModelCheckpoint" in name and state.get("best_model_path"):
            best = directory / Path(state["best_model_path"]).name
            if best.is_file():
                return best
    raise ValueError(f"test_checkpoint: fit recorded no best checkpoint in {newest}; use last.")


if __name__ == "__main__":
    sys.exit(0 if run_point(sys.argv[1]) else 1)
