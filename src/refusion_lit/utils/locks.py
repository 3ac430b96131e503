"""Locks between processes: held until they are released or their holder exits, however it does."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock as Lock
from filelock import Timeout

__all__ = ["Lock", "release_lock", "try_lock"]


def try_lock(path: Path) -> Lock | None:
    """Lock a file without waiting; missing parent directories are created.

    Returns:
        The lock, or ``None`` if another process holds it.

    Raises:
        OSError: If the file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def release_lock(lock: Lock) -> None:
    """Release a lock and remove its file."""
    Path(lock.lock_file).unlink(missing_ok=True)  # before unlocking: no other process can lock a removed file
    lock.release()
