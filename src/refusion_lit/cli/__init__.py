"""The command line. Help is printed from files, and a command imports only what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from signal import SIGPIPE

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

`refusion-lit COMMAND --help` lists the options, `refusion-lit --version` the version.
"""

OWN = {
    "generate": "generate.run",
    "serve": "serve.run",
    "chat": "chat.run",
    "trace": "trace.run",
    "score": "score.run",
    "evaluate": "evaluate.run",
    "export": "export.run",
    "import-gguf": "export.import_gguf",
    "sweep": "sweep.run",
    "init": "init.run",
    "report": "report.run",
}
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
    try:
        try:
            return _run(argv[0] if argv else "", argv[1:])
        finally:
            sys.stdout.flush()  # while an error can still be told
    except ValueError as error:
        from refusion_lit.utils.errors import NothingToDoError, place_in_own_code

        message = " ".join(str(error).split())
        if isinstance(error, NothingToDoError):
            print(message, file=sys.stderr)
            return 0
        return _fail(message + place_in_own_code(error))
    except BrokenPipeError:  # the reader of a pipe has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 128 + SIGPIPE
    except OSError as error:
        if error.errno is None:  # raised by a library, of a download that failed for example
            return _fail(" ".join(str(error).split()))
        return _fail(f"{error.filename or 'standard output or a log file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)


def _run(command: str, rest: list[str]) -> int:
    if command in ("", "-h", "--help"):
        print(_USAGE, end="")
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
    return _fail(f"unknown command {command!r}{suggestion}")


def _fail(message: str, code: int = 2) -> int:
    print(f"refusion-lit: error: {message}", file=sys.stderr)
    return code
