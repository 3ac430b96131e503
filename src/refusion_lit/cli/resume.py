"""Resumes an interrupted run: finds the arguments of its command, and its newest checkpoint."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from refusion_lit.checkpoints.files import find_newest, read_checkpoint
from refusion_lit.cli.parser import list_config_files
from refusion_lit.cli.run_directory import PLACE
from refusion_lit.cli.run_loggers import METRICS
from refusion_lit.reports.results import CONFIG
from refusion_lit.training.callbacks import ADDED_VALIDATION, ValidateLastStep
from refusion_lit.training.resume import count_finished_epochs
from refusion_lit.utils.errors import NothingToDoError
from refusion_lit.utils.files import read_text, read_yaml
from refusion_lit.utils.nested import get_nested
from refusion_lit.utils.require import require


def expand_resume(command: str, args: Sequence[str], resume: str) -> list[str]:
    """Return the arguments of a command that resumes a run.

    Args:
        command: ``fit``, ``test`` or ``predict``.
        args: The other arguments.
        resume: The run's directory or version; empty for the newest run with the command's run name.

    Raises:
        ValueError: If the command cannot be resumed, or ``resume`` is neither a run nor a version.
    """
    require(command != "validate", "resume", "fit, test or predict", command, "leave it out")
    resume_options = ["--ckpt_path=last"] if command == "fit" else ["--model.resume=true"]
    directory = Path(resume)
    if resume and (directory / CONFIG).is_file():
        run_command = _read_command(directory / CONFIG)
        instead = f"{command} with --config {directory / CONFIG} --ckpt_path {directory}"
        fix = instead if run_command == "fit" else f"name a run of {command}"
        got = f"{directory}, a run of {run_command}"
        require(run_command == command, "resume", f"a run of {command}", got, fix)
        directory = Path(os.path.abspath(directory))  # . and .. have no names
        config = [] if any(arg.partition("=")[0] in ("--config", "-c") for arg in args) else [directory / CONFIG]
        values = (directory.parent.parent, directory.parent.name, directory.name)
        place = [f"--{option}={value}" for option, value in zip(PLACE, values, strict=True)]
        return [*(f"--config={path}" for path in config), *args, *place, *resume_options]
    fix = "name a run, as in fit --resume runs/NAME/VERSION"
    require(bool(resume or args), "resume", "a run's directory, or --config FILE", "neither", fix)
    place = _read_place(args)
    folder = Path(place["runs_dir"] or "runs") / (place["run_name"] or "default")
    version = resume or place["run_version"]
    is_version = not resume or (directory.name == resume and (folder / resume).is_dir())
    newest = None if version and is_version else _newest_run(folder if is_version else directory, command)
    fix = f"give the newest run, {newest}" if newest else "give a run that exists"
    require(is_version, "resume", f"a run's directory (with {CONFIG}) or a version in {folder}", resume, fix)
    version = newest.name if newest else version
    return [*args, *([] if version is None else [f"--run_version={version}"]), *resume_options]


def _read_place(args: Sequence[str]) -> dict[str, str | None]:
    """Return the options that name a run. The command line comes before its config files."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in PLACE:
        parser.add_argument(f"--{name}", nargs="?")
    options = vars(parser.parse_known_args(args)[0])
    for path in reversed(list_config_files(args)):
        values = read_yaml(path, "config")
        options |= {name: values[name] for name in PLACE if options[name] is None and values.get(name) is not None}
    return {name: None if options[name] is None else str(options[name]) for name in PLACE}


def _newest_run(folder: Path, command: str) -> Path | None:
    """Return the directory of the newest run of a command in a folder of runs."""
    runs = sorted(folder.glob(f"*/{CONFIG}"), key=lambda path: path.parent.stat().st_mtime_ns, reverse=True)
    return next((path.parent for path in runs if _read_command(path) == command), None)


def _read_command(config: Path) -> str:
    """Return the command that wrote a run's config.

    The configs of ``validate`` and ``test`` are alike. A validation logs a validation loss; a test logs none.
    """
    values = read_yaml(config, "resume")
    is_whole = {"trainer", "model", "data", "ckpt_path"} <= values.keys()
    got = f"{config}, which lacks options and may be truncated"
    fix = "restore it, or start with --config and the options of the run"
    require(is_whole, "resume", f"the whole {CONFIG} that the run wrote", got, fix)
    if "return_predictions" in values:
        return "predict"
    if "verbose" not in values:
        return "fit"
    metrics = config.with_name(METRICS)
    return "validate" if metrics.is_file() and ",val/" in read_text(metrics, "resume") else "test"


def find_last_checkpoint(config: Namespace, command: str) -> Path | None:
    """Return the newest checkpoint under the run's name; for ``fit`` with a version, under that version.

    Raises:
        ValueError: If there is no checkpoint. A ``fit`` with a version may start without a checkpoint.
    """
    folder = Path(config.runs_dir) / config.run_name
    folders = [folder / config.run_version if config.run_version and command == "fit" else folder]
    folders += list_dirpaths(config.trainer.callbacks)
    path, damaged = find_newest(folders, resumable=command == "fit")
    if path is None and command != "fit":
        raise ValueError(f"ckpt_path: expected a checkpoint for 'last' in {folders[0]}, found none; give its path.")
    if path is None and config.run_version:
        left = next(folders[0].rglob("*.ckpt"), None)
        fix = "remove it to start at the beginning, or name another run"
        got = f"{left}, which is damaged" if left in damaged else f"{left}, which holds only weights"
        require(left is None, "resume", "a whole checkpoint, with the optimizer's state", got, fix)
    if path is not None and damaged:
        files = ", ".join(map(str, damaged))
        rank_zero_warn(f"{files}: damaged, perhaps truncated; continuing from {path}, the newest whole checkpoint")
    return path


def list_dirpaths(callbacks: Any) -> list[Path]:  # noqa: ANN401 - an option of the trainer
    """List the directories in which callbacks save checkpoints outside the run's directory.

    Args:
        callbacks: The option ``trainer.callbacks``: a callback's class and options, a list of them, or ``None``.
    """
    listed = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    paths = [get_nested(callback, "init_args.dirpath") for callback in listed]
    return [Path(path) for path in paths if path]


def check_unfinished(path: Path, trainer: Namespace) -> tuple[int, int]:
    """Return the first step, and the first validation's step, that a resumed training logs.

    They differ if the end of the earlier training caused a validation just before the checkpoint.

    Raises:
        NothingToDoError: If all steps or epochs are done.
    """
    checkpoint = read_checkpoint(path, mmap=True)
    num_epochs = count_finished_epochs(checkpoint["loops"]["fit_loop"])
    for unit, number in (("steps", checkpoint["global_step"]), ("epochs", num_epochs)):
        limit = trainer[f"max_{unit}"]
        if limit is not None and 0 <= limit <= number:
            done = f"{path.parent.parent} is complete: {number} of {limit} {unit}"
            raise NothingToDoError(f"{done}; raise trainer.max_{unit} to train longer")
    step = int(checkpoint["global_step"])
    is_added = ADDED_VALIDATION in checkpoint.get("callbacks", {}).get(ValidateLastStep.__qualname__, {})
    return step, step - is_added
