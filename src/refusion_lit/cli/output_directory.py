"""The directory that ``export`` and ``import-gguf`` write: a new one, complete or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from refusion_lit.utils.errors import is_write_failure, write_failure
from refusion_lit.utils.files import atomic_directory
from refusion_lit.utils.require import require


def check_new(output: Path) -> None:
    """Refuse to write into a directory that holds something.

    Raises:
        ValueError: If there is something under this name.
    """
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    require(is_free, "output", "a new or empty directory", str(output), "choose another one")


@contextmanager
def filled(output: Path) -> Iterator[Path]:
    """Yield a directory to fill, which gets its name when it is complete; see :func:`atomic_directory`.

    Raises:
        ValueError: If it cannot be written, for lack of space or permission.
    """
    try:
        with atomic_directory(output) as directory:
            yield directory
    except Exception as error:
        if isinstance(error, ValueError) or not is_write_failure(error):
            raise
        raise ValueError(
            f"output: {output} cannot be written ({write_failure(error)}). Make room, or choose another directory."
        ) from error
