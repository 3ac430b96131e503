"""Runs one point: its subcommands in order, then writes its outcome.

Started as ``python -m refusion_lit.sweeps.worker FOLDER``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from refusion_lit.sweeps.files import LOG, OUTCOME, POINT, tail
from refusion_lit.utils.files import read_json, write_json_atomically

# Set by the launcher of an outer run; a point's own run must not inherit them.
_OUTER_RUN = ("REFUSION_LIT_RUN_VERSION", "LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK")


def run_point(folder: str) -> bool:
    """Run a point and write ``outcome.json`` as the last step.

    Args:
        folder: Directory of the point, with its ``point.json``.

    Returns:
        Whether the point finished.
    """
    place = Path(folder)
    point = read_json(place / POINT)
    for subcommand in point["commands"]:
        shutil.rmtree(place / subcommand, ignore_errors=True)
    start = time.monotonic()
    error = _run_commands(place, point)
    results = read_json(place / "test" / "results.json")
    if error is None and not isinstance(results, dict):
        error = "test wrote no results.json"
    seconds = time.monotonic() - start
    outcome = {name: results.get(name, {}) for name in ("results", "mismatches")} if error is None else {"error": error}
    status = "finished" if error is None else "failed"
    write_json_atomically(place / OUTCOME, {"status": status, "seconds": seconds, **outcome})
    return error is None


def _run_commands(place: Path, point: dict[str, Any]) -> str | None:
    """Run the point's subcommands until one fails; return its error."""
    environment = {name: value for name, value in os.environ.items() if name not in _OUTER_RUN}
    with (place / LOG).open("wb") as log:
        for subcommand, command in point["commands"].items():
            arguments = list(command)
            if subcommand == "test" and "fit" in point["commands"]:
                try:
                    arguments.append(f"--ckpt_path={find_checkpoint(place / 'fit', point['test_checkpoint'])}")
                except ValueError as error:
                    return str(error)
            done = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
            )
            if done.returncode:
                return f"{subcommand} ended with exit code {done.returncode}:\n{tail(place / LOG)}"
    return None


def find_checkpoint(folder: Path, which: str) -> Path:
    """Return a checkpoint of a fit.

    Args:
        folder: The fit's directory.
        which: ``last``, or ``best`` by the value that the run's ModelCheckpoint monitors.

    Raises:
        ValueError: If there is none.
    """
    directory = folder / "checkpoints"
    files = sorted(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"fit left no checkpoint in {directory}; add a ModelCheckpoint to trainer.callbacks.")
    newest = next((path for path in files if path.name == "last.ckpt"), files[-1])
    if which == "last":
        return newest
    import torch  # takes seconds to import, so only where it is needed

    states = torch.load(newest, map_location="cpu", weights_only=True).get("callbacks", {})
    for name, state in states.items():
        if "ModelCheckpoint" in name and state.get("best_model_path"):
            best = directory / Path(state["best_model_path"]).name
            if best.is_file():
                return best
    raise ValueError(f"test_checkpoint: fit recorded no best checkpoint in {newest}; use last.")


if __name__ == "__main__":
    sys.exit(0 if run_point(sys.argv[1]) else 1)
