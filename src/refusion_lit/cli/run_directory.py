"""Where a run of the Trainer lands: RUNS_DIR/RUN_NAME/VERSION, which holds one run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import Namespace

from refusion_lit.checkpoints.files import newest_checkpoint, read_checkpoint
from refusion_lit.cli.usage_errors import options_given
from refusion_lit.utils.errors import NothingToDoError
from refusion_lit.utils.files import Lock, read_yaml, release_lock, try_lock
from refusion_lit.utils.require import require

CONFIG = "config.yaml"
METRICS = "metrics.csv"
_OPTIONS = ("runs_dir", "run_name", "run_version")


def check_names(run_name: str, run_version: str | None) -> None:
    """Refuse names that lead out of the directory of runs.

    Raises:
        ValueError: If a name is empty or leads to another directory.
    """
    for option, value in (("run_name", run_name), ("run_version", run_version)):
        parts = () if value is None else Path(value).parts
        inside = value is None or (bool(parts) and ".." not in parts and not Path(value).is_absolute())
        holds = inside and (option == "run_name" or len(parts) < 2)
        require(holds, option, "a name inside RUNS_DIR", value, "choose a name without .. and leading /")


def next_version(folder: Path) -> str:
    """Return the first free ``version_N``; other processes of the same run read it from the environment."""
    shared = os.environ.get("REFUSION_LIT_RUN_VERSION")
    if shared:
        return shared
    taken = [int(p.name[8:]) for p in folder.glob("version_*") if p.name[8:].isdigit()]
    version = f"version_{max(taken, default=-1) + 1}"
    if "RANK" not in os.environ:
        os.environ["REFUSION_LIT_RUN_VERSION"] = version
    return version


def is_first_process() -> bool:
    """Return whether this process writes the run's directory."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


@dataclass(frozen=True)
class Claim:
    """The right to write a run's directory, held by one process.

    Attributes:
        directory: The directory.
        is_new: Whether this run has created it.
        lock: What keeps other processes out.
        moved: Where the losses of an interrupted run are now; ``None`` if there were none.
    """

    directory: Path
    is_new: bool
    lock: Lock
    moved: Path | None = None

    def release(self, *, failed: bool) -> None:
        """Give the right up; remove a new directory if the run has failed and left no result in it.

        A run that failed before its first result puts the losses of the interrupted one back.
        """
        metrics = self.directory / METRICS
        if failed and self.moved is not None and not (metrics.is_file() and metrics.stat().st_size):
            self.moved.replace(metrics)
        release_lock(self.lock)
        if failed and self.is_new and all(map(_is_beginning, self.directory.rglob("*"))):
            shutil.rmtree(self.directory, ignore_errors=True)


def claim(directory: Path, *, keep_metrics: bool = False) -> Claim | None:
    """Create and lock a run's directory before any work, and move the losses of a former run out of the logger's way.

    Args:
        directory: The directory.
        keep_metrics: Leave them: a training continues from a checkpoint of the directory.

    Returns:
        The claim; ``None`` on processes that do not write the directory.

    Raises:
        ValueError: If nothing can be written there, or another run is writing there.
    """
    if not is_first_process():
        return None
    is_new = not directory.exists()
    try:
        lock = try_lock(directory / ".lock")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"runs_dir: expected a directory that can be written, got {directory} ({reason}); choose another one."
        ) from error
    fix = "wait for it, or choose another name"
    require(lock is not None, "run_version", "a directory that no other process writes to", str(directory), fix)
    assert lock is not None
    metrics = directory / METRICS
    moved = None
    if metrics.is_file() and not keep_metrics:
        number = sum(1 for _ in directory.glob("metrics_before_*.csv")) + 1
        moved = metrics.rename(directory / f"metrics_before_{number}.csv")
    return Claim(directory, is_new, lock, moved)


def _is_beginning(path: Path) -> bool:
    """Return whether a run writes this before its first result: config, environment, headers, or an empty file."""
    names = (CONFIG, "environment.json", "events.out.tfevents.*", "*.meta.json")
    return path.is_dir() or path.stat().st_size == 0 or any(path.match(name) for name in names)


def with_resume(command: str, args: Sequence[str], resume: str) -> list[str]:
    """Return the arguments of a command that resumes a run.

    Args:
        command: ``fit``, ``test`` or ``predict``.
        args: The other arguments.
        resume: The run's directory, or its version, or nothing for the newest run of the name.

    Raises:
        ValueError: If the command cannot be resumed, or ``resume`` is neither a run nor a version.
    """
    require(command != "validate", "resume", "fit, test or predict", command, "leave it out")
    goes_on = ["--ckpt_path=last"] if command == "fit" else ["--model.resume=true"]
    directory = Path(resume)
    if resume and (directory / CONFIG).is_file():
        directory = Path(os.path.abspath(directory))  # its name and its parents' are needed, of . or .. too
        config = [] if any(arg.partition("=")[0] in ("--config", "-c") for arg in args) else [directory / CONFIG]
        place = (directory.parent.parent, directory.parent.name, directory.name)
        named = [f"--{option}={value}" for option, value in zip(_OPTIONS, place, strict=True)]
        return [*(f"--config={path}" for path in config), *args, *named, *goes_on]
    fix = "give one of them, as in fit --resume runs/NAME/VERSION"
    require(bool(resume or args), "resume", "a run's directory, or --config FILE", "neither", fix)
    known = {each.name: str(each.value) for each in options_given(args) if each.value is not None}
    folder = Path(known.get("runs_dir") or "runs") / (known.get("run_name") or "default")
    version = resume or known.get("run_version")
    if resume and not (folder / resume).is_dir():
        raise ValueError(
            f"resume: expected a run's directory (with {CONFIG}) or a version in {folder}, got {resume}; "
            "give one that exists."
        )
    if version is None:
        runs = sorted(folder.glob(f"*/{CONFIG}"), key=lambda path: path.parent.stat().st_mtime_ns, reverse=True)
        version = next((path.parent.name for path in runs if _command_of(path) == command), None)
    return [*args, *([] if version is None else [f"--run_version={version}"]), *goes_on]


def _command_of(config: Path) -> str:
    """Return the command that wrote a run's config: each has options that the others lack; of a test or validation."""
    values = read_yaml(config, "resume")
    return "predict" if "return_predictions" in values else "test" if "verbose" in values else "fit"


def last_checkpoint(config: Namespace, command: str) -> Path | None:
    """Return the newest checkpoint of the run's name; for ``fit``, of the run's version if one is named.

    Raises:
        ValueError: If there is none, except for ``fit``.
    """
    folder = Path(config.runs_dir) / config.run_name
    folders = [folder / config.run_version if config.run_version and command == "fit" else folder]
    for callback in config.trainer.callbacks or []:
        dirpath = callback.get("init_args", Namespace()).get("dirpath")
        folders += [Path(dirpath)] if dirpath else []
    path = newest_checkpoint(folders, resumable=command == "fit")
    if path is None and command != "fit":
        raise ValueError(f"ckpt_path: expected a checkpoint for 'last' in {folders[0]}, found none; give its path.")
    return path


def check_unfinished(path: Path, trainer: Namespace) -> int:
    """Return the number of steps after which a checkpoint was saved, if its training has more to do.

    Args:
        path: The checkpoint.
        trainer: Options of the trainer, with ``max_steps`` and ``max_epochs``.

    Raises:
        NothingToDoError: If all steps or epochs are done.
    """
    checkpoint = read_checkpoint(path, mmap=True)
    num_steps = int(checkpoint["global_step"])
    loop = checkpoint["loops"]["fit_loop"]
    begun = loop["epoch_progress"]["current"]["ready"]
    num_epochs = begun if loop["epoch_loop.batch_progress"]["is_last_batch"] else begun - 1
    ends = {"max_steps": (num_steps, trainer.max_steps), "max_epochs": (num_epochs, trainer.max_epochs)}
    for option, (number, limit) in ends.items():
        if limit is not None and 0 <= limit <= number:
            unit = option.removeprefix("max_")
            directory = path.parent.parent
            raise NothingToDoError(
                f"{directory} is complete: {number} of {limit} {unit}; raise trainer.{option} to train longer"
            )
    return num_steps
