"""Files of a sweep: written whole or not at all, and locks that end with the processes that hold them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

OUTCOME, POINT, LOG, LOCK, PROCESS = "outcome.json", "point.json", "log.txt", "lock", "process.json"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a kill at any moment leaves the old content or the new one.

    Args:
        path: The file; its directory is made.
        content: Text (UTF-8) or bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with beside.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_json(path: Path, values: Any) -> None:  # noqa: ANN401 - JSON
    """Write JSON whole or not at all."""
    write_whole(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON
    """Return a file's JSON; ``None`` where there is no file or no JSON in it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def tail(path: Path, num_characters: int = 2000) -> str:
    """Return the end of a text file, empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-num_characters:].strip()
    except FileNotFoundError:
        return ""


def take_lock(path: Path) -> IO[bytes] | None:
    """Lock a file, for as long as this process or one that inherits the open file lives.

    Returns:
        The open file to be kept, or ``None`` if another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def stop_left_over(folder: Path, *, seconds: float = 10.0) -> None:
    """Stop what a killed sweep left running in a point's folder.

    The point's processes inherit its lock: a lock that is held proves that some of them live, and so that the
    recorded process group is still theirs.

    Args:
        folder: The point's folder.
        seconds: How long to wait for them to end.

    Raises:
        ValueError: If they do not end.
    """
    recorded = read_json(folder / PROCESS)
    until = time.monotonic() + seconds
    while (lock := take_lock(folder / LOCK)) is None:
        if recorded:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(recorded["group"], signal.SIGKILL)
        if time.monotonic() > until:
            raise ValueError(
                f"resume: expected no process at work in {folder}, got one left by an earlier sweep; "
                "end it (or its SLURM job), then resume."
            )
        time.sleep(0.05)
    lock.close()
