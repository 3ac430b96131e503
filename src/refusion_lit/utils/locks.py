"""Locks between processes: held while a file is open, released when the holder exits, however it does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class Lock:
    """A locked file. The lock is held until it is closed or forgotten, here and in child processes that inherited it.

    Args:
        path: The file.
        descriptor: Its open descriptor.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def fileno(self) -> int:
        """Return the descriptor, for child processes to inherit."""
        return self._descriptor

    def close(self) -> None:
        """Release the lock; does nothing the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Lock:
        """Hold the lock in a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the lock."""
        self.close()

    def __del__(self) -> None:
        """Release the lock."""
        self.close()


def try_lock(path: Path) -> Lock | None:
    """Lock a file without waiting.

    Returns:
        The lock, or ``None`` if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        lock = Lock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666))
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        if path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
            return lock
        lock.close()  # its holder removed it after it was opened here


def release_lock(lock: Lock) -> None:
    """Release a lock and remove its file."""
    lock.path.unlink(missing_ok=True)  # unlink before unlocking: no other process can lock a removed file
    lock.close()
