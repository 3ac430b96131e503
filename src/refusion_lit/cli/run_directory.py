"""The directory of a run, RUNS_DIR/RUN_NAME/VERSION: its name, its lock, and the config saved in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from refusion_lit.cli.run_loggers import METRICS
from refusion_lit.reports.results import CONFIG, ENVIRONMENT, RESULTS, environment, read_run_config
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.utils.files import (
    Lock,
    acquire_lock,
    differences,
    read_object,
    read_yaml,
    release_lock,
    write_atomically,
    write_json_atomically,
)
from refusion_lit.utils.nested import get_nested
from refusion_lit.utils.require import require

PLACE = ("runs_dir", "run_name", "run_version")
"""Options that name a run's directory."""


def check_run_names(run_name: str, run_version: str | None) -> None:
    """Refuse names that lead out of the directory of runs.

    Raises:
        ValueError: If a name is empty or leads to another directory.
    """
    for option, value in (("run_name", run_name), ("run_version", run_version)):
        parts = () if value is None else Path(value).parts
        inside = value is None or (bool(parts) and ".." not in parts and not Path(value).is_absolute())
        is_name = inside and (option == "run_name" or len(parts) < 2)
        require(is_name, option, "a name inside RUNS_DIR", value, "choose a name without .. and leading /")


def next_version(folder: Path) -> str:
    """Return the first free ``version_N``. The run's other processes read it from the environment."""
    shared = os.environ.get("REFUSION_LIT_RUN_VERSION")
    if shared:
        return shared
    taken = [int(path.name[8:]) for path in folder.glob("version_*") if path.name[8:].isdigit()]
    version = f"version_{max(taken, default=-1) + 1}"
    if "RANK" not in os.environ:
        os.environ["REFUSION_LIT_RUN_VERSION"] = version
    return version


class Claim:
    """A process's right to write into a run's directory. The directory is created and locked before any work.

    Attributes:
        directory: The directory.
        lock: Lock against other processes. ``None`` on all but the run's first process: they write nothing.

    Raises:
        ValueError: If the directory cannot be written, or another run is writing into it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock: Lock | None = None
        # Not Lightning's rank: Lightning reads it once on import, so that a forked process has the rank of its parent.
        rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
        if int(rank) > 0:
            return
        self._created = [path for path in (directory, *directory.parents) if not path.exists()]
        for name in (CONFIG, ENVIRONMENT, RESULTS, METRICS):
            is_free = not (directory / name).is_dir()
            got = f"{directory / name}, which is a directory"
            require(
                is_free, "runs_dir", f"a place for the file {name}", got, "remove it, or choose another run_version"
            )
        fix = "wait for it, or choose another name"
        try:
            lock = directory / ".lock"
            self.lock = acquire_lock(lock, "run_version", f"other process that writes to {directory}", fix)
        except OSError as error:
            got = f"{directory} ({error.strerror or error})"
            raise ValueError(
                f"runs_dir: expected a directory that can be written, got {got}; choose another one."
            ) from error

    def release(self, *, failed: bool) -> None:
        """Unlock the directory; remove the directories that a failed run created, unless they hold a result."""
        if self.lock is None:
            return
        release_lock(self.lock)
        if failed and self._created and all(map(_is_beginning, self.directory.rglob("*"))):
            shutil.rmtree(self.directory, ignore_errors=True)
            with suppress(OSError):  # a directory that another run uses is not empty
                for parent in self._created[1:]:
                    parent.rmdir()


def _is_beginning(path: Path) -> bool:
    """Return whether a run writes this file before its first result."""
    names = (CONFIG, ENVIRONMENT, "events.out.tfevents.*", "*.meta.json")
    return path.is_dir() or path.stat().st_size == 0 or any(path.match(name) for name in names)


def continues(config: Namespace, directory: Path) -> bool:
    """Return whether a fit continues from a checkpoint in its own directory."""
    source = config.get("ckpt_path")
    return bool(source) and Path(source).resolve().is_relative_to(directory.resolve())


_FILES = (
    *(f"data.task.init_args.{name}" for name in ("train", "validation", "test", "files", "dataset")),
    "data.tokenizer.init_args.source",
    "model.backbone.source",
    "model.backbone.draft",
    "model.decoding.verifier",
)
"""Options that may name a file or a directory."""
_WORKING_DIRECTORY = "working_directory"


def find_moved_files(config: Namespace | dict[str, Any], written: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Find the files that a run's config names, also from another working directory.

    A relative path starts at the working directory. If it exists only in the run's working directory, it becomes an
    absolute path. The config keeps relative paths, so that a project may be copied as a whole.

    Args:
        config: A command's options; changed in place.
        written: The content of config files by path.

    Returns:
        The changed options, each with its new value.
    """
    changes = []
    for path, values in written.items():
        folder = read_object(path.with_name(ENVIRONMENT)).get(_WORKING_DIRECTORY)
        if path.name != CONFIG or not isinstance(folder, str):
            continue
        for name in _FILES:
            value = get_nested(values, name)
            if value is None or get_nested(config, name) != value:
                continue  # the command line names another file
            files = [Path(text) for text in (value if isinstance(value, list) else [value])]
            existing = [file if file.exists() or not (folder / file).exists() else folder / file for file in files]
            if existing != files:
                group, _, option = name.rpartition(".")
                texts = [str(file) for file in existing]
                get_nested(config, group)[option] = texts if isinstance(value, list) else texts[0]
                start = f"relative to the directory in which the run of {path} started"
                changes.append(f"{name}: {', '.join(texts)}, {start}")
    return changes


class SaveRun(SaveConfigCallback):
    """Saves the resolved config and the environment into ``directory``, the run's directory."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note the run's directory. All processes must do so, because Lightning synchronizes them for it."""
        self.directory = Path(trainer.log_dir or trainer.default_root_dir)
        self.save_to_log_dir = False  # save_config writes the files
        # A training's config may also be given to a test, whose results must not land in the training's directory.
        self.config.run_version = None
        self._changed: dict[str, object] | None = None  # the options that a resumed run changes
        self._unwritten: dict[str, Any] | None = None
        # A resumed run keeps the config that it was started with.
        resumed = self.config.model.resume or continues(self.config, self.directory)
        if resumed and (self.directory / CONFIG).is_file():
            before = read_yaml(self.directory / CONFIG, "resume")
            find_moved_files(before, {self.directory / CONFIG: deepcopy(before)})
            now = yaml.safe_load(self.parser.dump(self.config, skip_none=False, skip_validation=True))
            changes = [item for item in differences(before, now) if item[0].rpartition(".")[2] not in _UNCOMPARED]
            self._changed = {name: after for name, _, after in changes}
            for name, old, new in changes if stage == "fit" else ():
                fix = "leave it out, or start a new run"
                require(name not in _RESTORED, name, f"{old}, whose weights the checkpoint has replaced", new, fix)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Write the config and ``environment.json``; called on the first process alone."""
        assert isinstance(pl_module, SlotDiffusionModule)
        record = {**environment(self.config.get("seed_everything")), _WORKING_DIRECTORY: str(Path.cwd())}
        if self._changed is None:
            write_atomically(
                self.directory / CONFIG, self.parser.dump(self.config, skip_none=False, skip_validation=True)
            )
        else:  # keep the command that started the run, and record the command that resumes it
            before = {**record, **read_object(self.directory / ENVIRONMENT)}
            resumed = [*before.get("resumed", ()), {"command": record["command"], "changed": self._changed}]
            record |= {name: before[name] for name in ("command", _WORKING_DIRECTORY)} | {"resumed": resumed}
        if self._changed is not None and stage == "fit":
            self._unwritten = record  # until training has taken the options
        else:
            write_json_atomically(self.directory / ENVIRONMENT, record)
        pl_module.evaluation.config = read_run_config(self.directory)
        pl_module.evaluation.environment = {n: value for n, value in record.items() if n != _WORKING_DIRECTORY}

    def on_train_batch_start(self, *_: object) -> None:
        """Record that a run is resumed, after all options were accepted."""
        if self._unwritten is None:
            return
        write_json_atomically(self.directory / ENVIRONMENT, self._unwritten)
        last, changed = ([{}] + [resumed.get("changed", {}) for resumed in self._unwritten["resumed"]])[-2:]
        self._unwritten = None
        if names := sorted(changed.keys() - _LENGTHS):
            kept = f"{CONFIG} keeps the options of the start, {ENVIRONMENT} records the change"
            rank_zero_warn(f"resumed with options that differ from the start of the run: {', '.join(names)}; {kept}")
        if dropped := [f"{name} ({value})" for name, value in last.items() if name not in {*changed, *_LENGTHS}]:
            rank_zero_warn(
                f"options that the last resumption changed have the values of {CONFIG} again: {', '.join(dropped)}; "
                "give them again to keep the change"
            )


_RESTORED = {f"model.backbone.{name}" for name in ("source", "revision", "draft")}
"""Options that a checkpoint's weights replace."""
_UNCOMPARED = {"ckpt_path", "resume", *PLACE}
"""Options that do not change results: the run's place and the checkpoint to resume from."""
_LENGTHS = {"trainer.max_steps", "trainer.max_epochs", "trainer.max_time"}
"""Options that a resumed run may change without a warning."""
