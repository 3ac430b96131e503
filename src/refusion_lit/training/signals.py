"""A callback that saves a checkpoint and ends training when a signal arrives."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from refusion_lit.training.last_step import last_path


class SaveOnSignal(L.Callback):
    """Ends training after the current optimizer step when a signal arrives, with a checkpoint that resumes exactly.

    Handles SIGTERM, SIGINT (Ctrl-C) and, under SLURM, the signal that announces pre-emption (SIGUSR1), after which it
    requeues the job where Lightning would. Lightning's own handler saves in mid-step and into the working directory,
    where the next job of any run would resume from it. A second signal ends the process at once. A signal during
    validation takes effect after the next step. The resulting ``SystemExit`` has the exit code that shells use for the
    signal, and a ``message``.
    """

    def __init__(self) -> None:
        self._signum = 0
        self._message = ""
        self._before: dict[int, Any] = {}
        self._requeues: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Install the handlers in place of Lightning's."""
        for callback in trainer.checkpoint_callbacks:
            # After resuming, it would save the same step again, after a micro-batch and without its gradients.
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
            # Lightning's handler would only record a second SIGTERM.
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default if self._signum else handler)
        self._before = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:  # noqa: ANN401, ARG002
        """Save and stop at the end of an optimizer step if any process has received a signal."""
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # gradients are in no checkpoint
        if trainer.strategy.reduce_boolean_decision(bool(self._signum), all=False):
            path = str(_last_path(trainer))
            trainer.save_checkpoint(path)
            self._signum = self._signum or signal.SIGTERM
            self._message = (
                f"stopped by {signal.Signals(self._signum).name} after step {trainer.global_step}; saved {path}, "
                "resume with --ckpt_path last"
            )
            if self._signum == self._requeues and trainer.is_global_zero:
                self._message += f"; {_requeue()}"
            trainer._signal_connector.received_sigterm = True  # ends the loop once this step is logged

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Restore the previous handlers."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Restore the previous handlers, and report what ended training."""
        self._restore()
        if isinstance(exception, SIGTERMException) and self._message:
            exception.code = 128 + self._signum
            exception.message = self._message  # type: ignore[attr-defined]


def _requeue() -> str:
    """Requeue this SLURM job; return the outcome in words."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"scontrol could not requeue job {job} ({error})"
    return f"job {job} is requeued"


def _last_path(trainer: L.Trainer) -> Path:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return last_path(callback)
    return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints" / "last.ckpt"
