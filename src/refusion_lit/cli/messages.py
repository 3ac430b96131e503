"""Print warnings and errors on a single line, without tracebacks."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path
from signal import SIGPIPE
from traceback import extract_tb

from refusion_lit.utils.errors import NothingToDoError

_INSTALLED = (Path(__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix))


def show_warnings() -> None:
    """Print warnings on a single line, and equal warnings once."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = " ".join(str(message).split())
        if text in shown or issubclass(category, DeprecationWarning | FutureWarning | PendingDeprecationWarning):
            return
        shown.add(text)
        print_warning(text)

    warnings.showwarning = show


def print_warning(text: str) -> None:
    """Print a warning on standard error; its first word is coloured on a terminal."""
    name = "\x1b[33mwarning\x1b[0m" if sys.stderr.isatty() else "warning"
    sys.stderr.write(f"refusion-lit: {name}: {text}\n")


def print_failure(error: ValueError | OSError | KeyboardInterrupt) -> int:
    """Print why a command ended, and return its exit code: 0 if its work was done already."""
    message, code = " ".join(str(error).split()), 2
    if isinstance(error, NothingToDoError):
        print(message, file=sys.stderr)
        return 0
    if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the stream when it exits
        return 128 + SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", 130
    elif isinstance(error, ValueError):
        message += user_code_location(error)
    elif error.errno is not None:  # a library's own error, such as a failed download, has no errno
        message = f"{error.filename or 'standard output or a log file'}: {error.strerror or error}"
    print(f"refusion-lit: error: {message}", file=sys.stderr)
    return code


def user_code_location(error: BaseException) -> str:
    """Return ``" (FILE, line N)"`` if a user's decoder, objective or task led to an error, else an empty string.

    A message that names an option needs no location.
    """
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _INSTALLED)
        and Path(frame.filename).is_file()  # last: folders that this user may not read raise an error
    ]
    if not frames or re.match(r"[\w.]+: expected ", str(error)):
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"
