"""The command line. A command imports only what it needs, because torch and Lightning take seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from refusion_lit.version import __version__

_USAGE = """\
usage: refusion-lit COMMAND [OPTIONS]

  fit          train a model                        refusion-lit fit --config configs/quickstart.yaml
  validate     validation loss of a checkpoint
  test         decode a test set with every decoder named in the config, and print them side by side
  predict      write predictions as JSON lines
  generate     answer prompts from a checkpoint, a directory or a hub id
  serve        serve a model over HTTP: OpenAI's API, and a page to chat on
  chat         talk to a model and see in which order it decodes
  trace        watch a decode, forward by forward; writes an HTML page
  report       compare finished tests: a page, plots, a table
  score        score a predictions file again       refusion-lit score FILE --task Gsm8k --task.test DATA
  evaluate     run tasks of the lm-evaluation-harness
  export       turn a checkpoint into a Hugging Face directory
  import-gguf  turn a GGUF file (llama.cpp) into a Hugging Face directory
  sweep        run a grid or a list of options, and gather the results
  init         copy the example configs into a directory
  completion   complete commands and options in bash or zsh

`refusion-lit COMMAND --help` lists the options, `refusion-lit --version` the version.
"""

COMMANDS = {
    "generate": "generate.run",
    "serve": "serve.run",
    "chat": "chat.run",
    "trace": "trace.run",
    "report": "report.run",
    "score": "score.run",
    "evaluate": "evaluate.run",
    "export": "export.run",
    "import-gguf": "export.import_gguf",
    "sweep": "sweep.run",
    "init": "init.run",
    "completion": "completion.run",
}
"""Module and function of the commands without a Lightning Trainer."""

TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
"""LightningCLI's subcommands."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments; the process's own by default.

    Returns:
        The exit code: 0, 2 for a user's error, 3 if a server cut answers, 130 when interrupted, 141 when the reader of
        a pipe has left.
    """
    argv = list(args if args is not None else sys.argv[1:])
    if args is None:
        _prepare_process()
    try:
        try:
            return _run(argv[0] if argv else "", argv[1:])
        finally:
            sys.stdout.flush()  # here, because an error of the flush can still be reported
    except SystemExit as stopped:  # argparse has printed the help
        return int(stopped.code or 0)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        from refusion_lit.cli.messages import print_failure

        return print_failure(error)


def _prepare_process() -> None:
    """Replace closed standard streams, print warnings on one line, and collect garbage rarely, for fast imports."""
    from refusion_lit.cli.messages import show_warnings

    show_warnings()
    gc.set_threshold(20_000, 20, 20)  # imports make many objects and hardly any garbage
    sys.stdin = sys.stdin or Path("/dev/null").open()  # noqa: SIM115 - None is a closed stream
    sys.stdout = sys.stdout or Path("/dev/null").open("w")  # noqa: SIM115
    # A character that the terminal's encoding lacks must not end a command that has done its work.
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue] - a TextIOWrapper


def _run(command: str, args: list[str]) -> int:
    if command in ("", "-h", "--help"):
        print(_USAGE, end="")
        return 0 if command else 2
    if command == "--version":
        print(f"refusion-lit {__version__}")
        return 0
    if command in COMMANDS:
        module, _, function = COMMANDS[command].partition(".")
        return getattr(import_module(f"refusion_lit.cli.{module}"), function)(args)
    if command in TRAINER_COMMANDS:
        from refusion_lit.cli.trainer import run

        return run(command, args)
    from refusion_lit.cli.parser import suggest

    raise ValueError(f"unknown command {command!r}{suggest(command, [*TRAINER_COMMANDS, *COMMANDS])}")
