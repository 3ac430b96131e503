"""Warnings and log lines on the terminal: one line each, without source paths and without advertisements."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def show_warnings() -> None:
    """Print each warning of this process once, as one line."""
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


def show_own_logs() -> None:
    """Let through what this package logs with Lightning's loggers, and of Lightning's own lines only warnings."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers = [_Lines()]
        logger.propagate = False


class _Lines(logging.Handler):
    """Prints one line a record."""

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if record.levelno >= logging.WARNING:
            print_warning(text)
        elif record.pathname.startswith(_PACKAGE):
            sys.stderr.write(f"{text}\n")
