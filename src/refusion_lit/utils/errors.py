"""Reasons of failed reads and writes in one line for users, and an exception for work that is done already."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from pickle import UnpicklingError
from traceback import extract_tb

_INSTALLED = (Path(__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix))


class NothingToDoError(ValueError):
    """Everything that was asked for is done already; commands print it and succeed."""


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message.

    Of an error of ``torch.load`` with ``weights_only`` it says what is wrong with the file instead, because torch's own
    message advises to load the file with code execution.
    """
    if isinstance(error, UnpicklingError):
        message = str(error).lower()
        if "unsupported" in message and "unsupported operand" not in message:
            return "it holds more than tensors and plain values, which could run code when it is loaded"
        return "it is not what torch.save writes"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def place_in_own_code(error: BaseException) -> str:
    """Return ``" (FILE, line N)"`` if a user's own decoder, objective or task led to an error, else an empty string.

    A message that names an option needs no place.
    """
    own = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _INSTALLED)
        and Path(frame.filename).is_file()  # last: folders that this user may not read raise an error
    ]
    if not own or re.match(r"[\w.]+: expected ", str(error)):
        return ""
    return f" ({own[-1].filename}, line {own[-1].lineno})"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out; torch has a type of its own for GPUs only."""
    is_told = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_told or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def write_failure(error: BaseException) -> str | None:
    """Return the operating system's reason for a failed write, ``None`` for other errors.

    Libraries may wrap it in errors of their own; those in Rust have it in the text alone.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror or reason_of(cause)
        cause = cause.__cause__ or cause.__context__
    return reason_of(error) if "(os error" in str(error) else None
