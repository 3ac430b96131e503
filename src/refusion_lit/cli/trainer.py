"""``fit``, ``validate``, ``test`` and ``predict``: run the Trainer, report its errors, and print where results are."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import warnings
from argparse import ArgumentParser
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from refusion_lit.checkpoints.files import newest_checkpoint
from refusion_lit.cli import run_directory
from refusion_lit.cli.lightning import RefusionCLI
from refusion_lit.cli.messages import print_warning
from refusion_lit.cli.resume import expand_resume
from refusion_lit.cli.run_loggers import quiet_writers
from refusion_lit.training.callbacks import last_checkpoint
from refusion_lit.utils.errors import NothingToDoError

_PACKAGE = str(Path(__file__).parents[1])

# True warnings that a user cannot act on.
_IGNORED_WARNINGS = (
    "Experiment logs directory .* exists and is not empty",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "The dirpath has changed from",
    "Checkpoint directory .* exists and is not empty",
    "The .* does not have many workers",
    "The number of training batches",
    "Trying to infer the `batch_size`",
)

# A checkpoint names the callbacks of its training, which the other subcommands do not need.
_IGNORED_WITHOUT_TRAINING = ("Be aware that when using `ckpt_path`, callbacks used to create",)


def run(command: str, args: list[str]) -> int:
    """Run a Trainer command.

    Args:
        command: Its name.
        args: Its arguments.

    Raises:
        ValueError: If an argument or a config is wrong.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", nargs="?", const="")
    parsed, args = parser.parse_known_args(args)
    options = ""
    if parsed.resume is not None:  # the run's config does not have the options of the command that resumes it
        options = "".join(f" {shlex.quote(arg)}" for arg in args)
        args = expand_resume(command, args, parsed.resume)
    show_own_logs()
    for pattern in (*_IGNORED_WARNINGS, *(() if command == "fit" else _IGNORED_WITHOUT_TRAINING)):
        warnings.filterwarnings("ignore", message=pattern)
    if "LOCAL_RANK" not in os.environ:
        os.environ.pop("REFUSION_LIT_RUN_VERSION", None)
    RefusionCLI.claim = None
    failed = True
    try:
        with quiet_writers():
            cli = RefusionCLI([command, *args])
        failed = False
    except SIGTERMException as stopped:
        failed = False
        message = getattr(stopped, "message", "stopped by SIGTERM; finished work is on disk")
        return _fail(message + _how_to_resume(command, options), int(stopped.code or 143))
    except ProcessExitedException as stopped:  # a forked process, killed by a signal or stopped after a signal
        failed = False
        code = stopped.exit_code if stopped.exit_code > 0 else 128 - stopped.exit_code  # negative: killed by a signal
        names = {128 + number: number.name for number in signal.Signals}
        reason = f"stopped by {names[code]}" if code in names else str(stopped)
        return _fail(f"{reason}; finished work is on disk{_how_to_resume(command, options)}", code)
    except (MisconfigurationException, RuntimeError, ProcessRaisedException) as error:
        return _report_error(error)
    except SystemExit as stopped:
        if not isinstance(stopped.__context__, KeyboardInterrupt):
            raise
        failed = False
        return _fail(f"interrupted; finished work is on disk{_how_to_resume(command, options)}", 130)
    finally:
        if RefusionCLI.claim is not None:
            RefusionCLI.claim.release(failed=failed)
    _print_results(cli)
    return 0


def _report_error(error: Exception) -> int:
    """Print an error of Lightning that the user caused, and return the exit code; raise any other error."""
    name, _, message = str(error).rstrip().rpartition("\n")[2].partition(": ")  # end of a forked process's traceback
    kinds = {"ValueError": ValueError, f"{NothingToDoError.__module__}.NothingToDoError": NothingToDoError}
    if name in kinds:
        raise kinds[name](message) from None
    # Lightning's class for errors of the user; it raises some of them as RuntimeError.
    if isinstance(error, MisconfigurationException) or str(error).startswith("Early stopping conditioned on metric"):
        return _fail(f"trainer: {' '.join(str(error).split())}", 2)
    if "closed by peer" not in str(error) and "reset by peer" not in str(error):
        raise error
    return _fail("another process of this run has ended; its own error says why", 1)


def show_own_logs() -> None:
    """Print this package's log records, and warnings of Lightning."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers = [_Lines()]
        logger.propagate = False


class _Lines(logging.Handler):
    """Prints a line per record."""

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if record.levelno >= logging.WARNING:
            print_warning(text)
        elif record.pathname.startswith(_PACKAGE):
            sys.stderr.write(f"{text}\n")


def _fail(message: str, code: int) -> int:
    if rank_zero_only.rank == 0:  # all processes of a run stop for the same reason  # pyright: ignore[reportFunctionMemberAccess]
        sys.stderr.write(f"refusion-lit: error: {message}\n")
    return code


def _how_to_resume(command: str, options: str) -> str:
    if RefusionCLI.claim is None:
        return ""
    return f"; resume with: refusion-lit {command} --resume {_quote(RefusionCLI.claim.directory)}{options}"


def _print_results(cli: RefusionCLI) -> None:
    """Print where the results are, and after a training the command that tests the model."""
    if not cli.trainer.is_global_zero:
        return
    if cli.subcommand == "validate":
        for name, value in cli.trainer.callback_metrics.items():
            print(f"{name} {float(value):.6g}")
    if cli.subcommand == "predict" and RefusionCLI.claim is not None:
        decoder, *_ = cli.model.evaluation.decoders(cli.model.text_model()).values()
        print(f"{type(decoder).__name__}: {_relative(RefusionCLI.claim.directory / 'predictions.jsonl')}")
    if cli.subcommand == "fit":
        path = last_checkpoint(cli.trainer)
        directory = None if RefusionCLI.claim is None else RefusionCLI.claim.directory
        if path is None and directory is not None:  # callbacks of forked processes have saved the checkpoints
            path = newest_checkpoint([directory])
        if path is not None and directory is not None:
            config = directory / run_directory.CONFIG  # with the options of the command line
            print(f"checkpoint: {_relative(Path(path))}")
            print(f"next: refusion-lit test --config {_quote(config)} --ckpt_path {_quote(Path(path))}")


def _quote(path: Path) -> str:
    """Return a path quoted for the shell."""
    return shlex.quote(_relative(path))


def _relative(path: Path) -> str:
    """Return a path relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path)
