"""Checkpoints that are there whole or not at all, are loaded as data only, and are written when a signal comes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from refusion_lit.bundle import read_checkpoint


class CheckpointWriteError(ValueError):
    """A checkpoint cannot be written; the earlier ones are as they were."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it once it is on the disk.

    Whenever the process dies, the file of that name is the old one or the new one, never a part of either. Loading
    runs nothing that a file brings along.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:  # noqa: ANN401 - Lightning's signature
        """Write a checkpoint.

        Raises:
            CheckpointWriteError: If it cannot be written (no space, no permission).
        """
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        unfinished = target.with_name(f".{target.name}.unfinished")  # one that a killed process left is overwritten
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
            _sync_directory(target.parent)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as the one or the other
            reason = _reason(error)
            unfinished.unlink(missing_ok=True) if target.parent.is_dir() else None
            raise CheckpointWriteError(
                f"checkpoint: {target} cannot be written ({reason}). Make room or choose another runs_dir, then go on "
                "with --ckpt_path last; earlier checkpoints are as they were."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,  # noqa: ANN401 - Lightning's signature
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Load a checkpoint to the CPU: tensors and plain values only, whatever ``weights_only`` says.

        Raises:
            ValueError: If it is missing, damaged or holds anything else.
        """
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_checkpoint(path)


class SaveOnSignal(L.Callback):
    """Ends training behind the step in which a signal comes, with a checkpoint from which it goes on exactly.

    SIGTERM and SIGINT (Ctrl-C) do so, and under SLURM the signal that announces pre-emption (SIGUSR1), after which the
    job is queued again where Lightning would have done so. Lightning's own handler saves in the middle of a step, and
    into the working directory, where the next job of any run would go on from it. A second signal ends the process at
    once. A signal in a validation takes effect behind the step after it. The ``SystemExit`` then has an exit code as
    shells give it for the signal, and a ``message``.
    """

    def __init__(self) -> None:
        self._signum = 0
        self._message = ""
        self._before: dict[int, Any] = {}
        self._requeues: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Listen, in place of Lightning's own handlers."""
        for callback in trainer.checkpoint_callbacks:
            # Resumed, it would save the same step once more, behind its first micro-batch and without the gradients.
            if isinstance(callback, ModelCheckpoint) and trainer.global_step:
                callback._last_global_step_saved = trainer.global_step
        self._signum, self._message = 0, ""
        if threading.current_thread() is not threading.main_thread():
            return
        signals = [signal.SIGTERM, signal.SIGINT]
        environment = trainer._accelerator_connector.cluster_environment
        self._requeues = None
        if isinstance(environment, SLURMEnvironment):
            signals.append(environment.requeue_signal or signal.SIGUSR1)
            self._requeues = signals[-1] if environment.auto_requeue else None
        self._before = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signum = signum
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # Lightning's handler would only note a second SIGTERM.
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default if self._signum else handler)
        self._before = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:  # noqa: ANN401, ARG002
        """Save and stop if any process has been told to, at the end of an optimizer step."""
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # gradients are in no checkpoint
        if trainer.strategy.reduce_boolean_decision(bool(self._signum), all=False):
            path = str(_last_path(trainer))
            trainer.save_checkpoint(path)
            self._signum = self._signum or signal.SIGTERM
            self._message = (
                f"stopped by {signal.Signals(self._signum).name} after step {trainer.global_step}; saved {path}, "
                "go on with --ckpt_path last"
            )
            if self._signum == self._requeues and trainer.is_global_zero:
                self._message += f"; {_requeue()}"
            trainer._signal_connector.received_sigterm = True  # ends the loop when this step is logged

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Listen no more."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Listen no more, and say what has ended the training."""
        self._restore()
        if isinstance(exception, SIGTERMException) and self._message:
            exception.code = 128 + self._signum
            exception.message = self._message  # type: ignore[attr-defined]


def _requeue() -> str:
    """Queue this SLURM job again; says what became of it."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"scontrol could not queue job {job} again ({error})"
    return f"job {job} is queued again"


def newest_checkpoint(folders: list[Path]) -> Path | None:
    """Return the checkpoint that was written last, in these directories or below.

    Damaged files, which only other programs leave, are passed over.
    """
    found = [path for folder in folders for path in folder.rglob("*.ckpt") if not path.name.startswith(".")]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if _is_whole(path):
            return path
    return None


def _is_whole(path: Path) -> bool:
    if path.is_dir():  # strategies that shard write directories, this file last
        return (path / "meta.pt").is_file()
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # whatever a damaged file brings about
        return False
    return True


def _last_path(trainer: L.Trainer) -> Path:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath) / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
    return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints" / "last.ckpt"


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _sync_directory(directory: Path) -> None:
    """Have the renaming itself on the disk, where the system lets directories be opened."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """Return the system's reason for a failed write, which torch may have wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
