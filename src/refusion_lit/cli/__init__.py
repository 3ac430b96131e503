"""The command line. Help is printed from files, and a command imports only what it needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from refusion_lit.version import __version__

_NAMES = ("generate", "serve", "chat", "trace", "score", "evaluate", "export", "sweep", "init", "report")
OWN = {**{name: f"{name}.run" for name in _NAMES}, "import-gguf": "export.import_gguf"}
"""Module and function of the commands that do not need Lightning."""
_HELP = Path(__file__).with_name("help")
"""Pages that ``docs/help_pages.py`` renders, as the parsers need imports of seconds."""
_TRAINER = ("fit", "validate", "test", "predict")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments; the process's own by default.

    Returns:
        The exit code: 0, 2 for a user's error, 130 when interrupted, 141 when the reader of a pipe has left.
    """
    argv = list(args if args is not None else sys.argv[1:])
    if args is None:
        from refusion_lit.cli.messages import show_warnings

        show_warnings()
        sys.stdin = sys.stdin or Path("/dev/null").open()  # noqa: SIM115 - None is a closed one
        sys.stdout = sys.stdout or Path("/dev/null").open("w")  # noqa: SIM115
        # A name or an answer that the terminal's encoding lacks must not end a command that has done its work.
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue] - a TextIOWrapper
    try:
        try:
            return _run(argv[0] if argv else "", argv[1:])
        finally:
            sys.stdout.flush()  # while an error can still be told
    except (ValueError, OSError, KeyboardInterrupt) as error:
        from refusion_lit.cli.messages import tell_failure

        return tell_failure(error)


def _run(command: str, rest: list[str]) -> int:
    if command in ("", "-h", "--help"):
        print(Path(__file__).with_name("usage.txt").read_text(encoding="utf-8"), end="")
        return 0 if command else 2
    if command == "--version":
        print(f"refusion-lit {__version__}")
        return 0
    if command in (*OWN, *_TRAINER) and not {"-h", "--help", "--help=all"}.isdisjoint(rest):
        pages = [command]
        if command in _TRAINER:
            pages += ["shared", "trainer"] if "--help=all" in rest else ["shared"]
        print("".join((_HELP / f"{page}.txt").read_text(encoding="utf-8") for page in pages), end="")
        return 0
    if command in OWN:
        module, _, function = OWN[command].partition(".")
        return getattr(import_module(f"refusion_lit.cli.{module}"), function)(rest)
    if command in _TRAINER:
        from refusion_lit.cli.trainer import run

        return run(command, rest)
    from refusion_lit.cli.usage_errors import nearest

    suggestion = nearest(command, [*_TRAINER, *OWN]) or "; `refusion-lit --help` lists the commands"
    raise ValueError(f"unknown command {command!r}{suggestion}")
