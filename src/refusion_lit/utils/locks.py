"""Locks between processes: held while a file is open, released when the holder exits, however it does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


def try_lock(path: Path) -> IO[bytes] | None:
    """Lock a file without waiting.

    The lock is held while the returned file is open in this process or in a child process that inherited it.

    Returns:
        The open file, or ``None`` if another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()  # its holder removed it after it was opened here


def release_lock(lock: IO[bytes]) -> None:
    """Release a lock and remove its file."""
    Path(lock.name).unlink(missing_ok=True)  # first, so that nobody locks a file that is being removed
    lock.close()
