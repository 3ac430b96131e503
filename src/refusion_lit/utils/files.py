"""Files: atomic writes (a reader sees the old file or the new one, never a part of either) and tolerant JSON reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` when the block ends without an error.

    The content goes to a hidden file in the same directory, is synced to disk and then renamed. If the block raises,
    the hidden file is removed and ``path`` keeps its old content; if the process is killed, the next write to ``path``
    overwrites the hidden file. Only one process may write to a path at a time.

    Args:
        path: The file to replace; missing parent directories are created.

    Yields:
        A binary file.

    Raises:
        OSError: If the file cannot be written, for example for lack of space or permission.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Replace a file's content atomically; see :func:`atomic_writer`.

    Args:
        path: The file; missing parent directories are created.
        content: Text, written as UTF-8, or bytes.

    Raises:
        OSError: If the file cannot be written.
    """
    with atomic_writer(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_json_atomically(path: str | Path, values: Any) -> None:  # noqa: ANN401 - any JSON value
    """Replace a file's content by indented JSON; see :func:`atomic_writer`.

    Raises:
        OSError: If the file cannot be written.
    """
    write_atomically(path, json.dumps(values, indent=2) + "\n")


def read_json(path: str | Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return the JSON value in a file; ``None`` if the file is missing, unreadable or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # json nests as deep as the interpreter's stack
        return None


def _sync_directory(directory: Path) -> None:
    """Sync the renaming itself to disk, on systems that let a directory be opened."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
