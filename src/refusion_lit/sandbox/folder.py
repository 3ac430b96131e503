"""The working directory of a sandboxed program: measures it while the program runs, and deletes trees of any depth."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterator

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def working_directory() -> Iterator[str]:
    """Create an empty temporary directory, and delete it at the end with everything in it.

    A directory that cannot be deleted gives a warning instead of an error, which would end the caller's run.
    """
    directory = tempfile.mkdtemp(prefix="refusion-lit-")
    try:
        yield directory
    finally:
        try:
            delete_tree(directory)
        except OSError as error:
            message = f"sandbox: the files of a program are left in {directory} ({error}); delete them."
            warnings.warn(message, stacklevel=3)


def delete_tree(directory: str) -> None:
    """Delete a directory with everything in it.

    Each nested directory first moves to the top, so neither recursion nor the length of a path nor the number of open
    files limits the depth.

    Raises:
        OSError: If something cannot be deleted.
    """
    os.chmod(directory, 0o700)
    top = os.open(directory, _OPEN_DIRECTORY)
    try:
        pending = ["."]
        while pending:
            name = pending.pop()
            current = os.open(name, _OPEN_DIRECTORY, dir_fd=top)
            try:
                pending += _empty(current, top)
            finally:
                os.close(current)
            if name != ".":
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(directory)


def exceeds(directory: str, num_bytes: int, num_files: int) -> bool:
    """Return whether a directory holds more than a number of bytes, or of files and directories.

    Directories that cannot be listed count as too many files, as do paths that are longer than the system allows.
    """
    pending = [directory]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    num_files -= 1
                    num_bytes -= 512 * entry.stat(follow_symlinks=False).st_blocks
                    if num_files < 0 or num_bytes < 0:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except FileNotFoundError:  # deleted in the meantime
            continue
        except OSError:
            return True
    return False


def _empty(directory: int, top: int) -> list[str]:
    """Delete the files of an open directory; move its directories to the top and return their new names there."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    moved = []
    for name, is_directory in found:
        if is_directory:
            os.chmod(name, 0o700, dir_fd=directory)  # a program can remove all permissions of its directories
            moved.append(secrets.token_hex(16))
            os.rename(name, moved[-1], src_dir_fd=directory, dst_dir_fd=top)
        else:
            os.unlink(name, dir_fd=directory)
    return moved
