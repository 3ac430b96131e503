"""The process of one point: runs its subcommands in order, then writes its outcome."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from refusion_lit.utils.files import read_json, write_json_atomically
from refusion_lit.utils.locks import try_lock

OUTCOME = "outcome.json"
POINT = "point.json"
LOG = "log.txt"
LOCK = "lock"
PROCESS = "process.json"

_PATIENCE = 10.0
"""Seconds that killed processes have to exit."""

# Set by the launcher of an outer run; a point's own run must not inherit them.
_OUTER_RUN = ("REFUSION_LIT_RUN_VERSION", "LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK")


def run_point(folder: str) -> bool:
    """Run a point and write ``outcome.json`` as the last step; the point's lock is held meanwhile.

    Args:
        folder: Directory of the point, with its ``point.json``.

    Returns:
        Whether the point finished.

    Raises:
        ValueError: If another process runs the point.
    """
    place = Path(folder)
    lock = try_lock(place / LOCK)
    if lock is None:
        raise ValueError(f"{folder}: expected a point that is not running, got one that is; wait for its process.")
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
    lock.release()
    return error is None


def _run_commands(place: Path, point: dict[str, Any]) -> str | None:
    """Run the point's subcommands until one fails; return its error."""
    environment = {name: value for name, value in os.environ.items() if name not in _OUTER_RUN}
    with (place / LOG).open("wb") as log:
        for subcommand, command in point["commands"].items():
            arguments = list(command)
            if subcommand == "test" and "fit" in point["commands"]:
                try:
                    arguments.append(f"--ckpt_path={_last_checkpoint(place / 'fit')}")
                except ValueError as error:
                    return str(error)
            done = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
            )
            if done.returncode:
                return f"{subcommand} ended with exit code {done.returncode}:\n{tail(place / LOG)}"
    return None


def _last_checkpoint(fit: Path) -> Path:
    """Return the last checkpoint in a fit's directory.

    Raises:
        ValueError: If there is none.
    """
    directory = fit / "checkpoints"
    files = sorted(directory.glob("*.ckpt"), key=lambda path: (path.name == "last.ckpt", path.stat().st_mtime))
    if not files:
        raise ValueError(f"fit left no checkpoint in {directory}; add a ModelCheckpoint to trainer.callbacks.")
    return files[-1]


def tail(path: Path) -> str:
    """Return the last 2000 characters of a text file; none if there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""


def kill_orphan(folder: Path) -> None:
    """Kill the process group of a point that outlived its sweep.

    The process holds the point's lock. A held lock therefore proves that it is alive, and that the recorded process
    group id has not been reused.

    Args:
        folder: The point's directory.

    Raises:
        ValueError: If it does not exit in time.
    """
    recorded = read_json(folder / PROCESS)
    deadline = time.monotonic() + _PATIENCE
    while (lock := try_lock(folder / LOCK)) is None:
        if recorded:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(recorded["group"], signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ValueError(
                f"resume: expected no process of an earlier sweep in {folder}, got one that is still running; "
                "kill it (or cancel its SLURM job), then resume."
            )
        time.sleep(0.05)
    lock.release()
