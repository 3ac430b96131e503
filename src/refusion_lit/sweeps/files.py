"""Files of a sweep: their names, log tails, and processes that outlive it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from refusion_lit.utils.files import read_json
from refusion_lit.utils.locks import try_lock

OUTCOME, POINT, LOG, LOCK, PROCESS = "outcome.json", "point.json", "log.txt", "lock", "process.json"

_PATIENCE = 10.0
"""Seconds that killed processes have to exit."""


def tail(path: Path) -> str:
    """Return the last 2000 characters of a text file; none if there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""


def kill_orphans(folder: Path) -> None:
    """Kill the processes of a point that outlived their sweep.

    A point's processes inherit its lock. A held lock therefore proves that some of them are alive, and that the
    recorded process group id has not been reused.

    Args:
        folder: The point's directory.

    Raises:
        ValueError: If they do not exit in time.
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
    lock.close()
