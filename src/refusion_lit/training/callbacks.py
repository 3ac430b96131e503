"""Callbacks: validation and checkpoint of the last step, signals, and atomic files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from refusion_lit.checkpoints.files import read_checkpoint
from refusion_lit.utils.errors import error_reason, write_error_reason
from refusion_lit.utils.files import atomic_writer
from refusion_lit.utils.require import require

_REFUSED: dict[type[L.Callback], str] = {
    StochasticWeightAveraging: "use EMAWeightAveraging or WeightAveraging",  # their averages are in checkpoints
    LearningRateFinder: "set model.optimizer.lr, which a resumed run reads",
    BatchSizeFinder: "set data.batch_size, which a resumed run reads",
    BackboneFinetuning: "train a few weights with model.backbone.lora",  # the whole model is the attribute `backbone`
    ModelPruning: "prune the weights of the exported model",  # a model that is not built yet when the callback reads it
}

ADDED_VALIDATION = "added_validation"
"""Key in the state of :class:`ValidateLastStep`."""


def check_callbacks(callbacks: Iterable[L.Callback]) -> None:
    """Refuse Lightning callbacks that change weights or options without a record in checkpoint or config.

    Raises:
        ValueError: Naming the callback and its replacement.
    """
    for callback in callbacks:
        fix = next((fix for kind, fix in _REFUSED.items() if isinstance(callback, kind)), "")
        expected = "callbacks with which a run can be resumed"
        require(not fix, "trainer.callbacks", expected, type(callback).__name__, fix)


class ValidateLastStep(L.Callback):
    """Validates after the final step, so that the choice of the best checkpoint includes the final weights.

    Lightning validates at intervals only: with ``val_check_interval: 500`` and ``max_steps: 700``, it would never
    validate the final weights, which a test loads. The additional validation does not count for early stopping: a
    longer run that resumes from the last checkpoint then stops where an unbroken run stops. The validation that
    Lightning adds after ``max_time`` does not count, either. If ``limit_val_batches`` is 0, there is no additional
    validation.
    """

    def __init__(self) -> None:
        self._patience: dict[EarlyStopping, dict[str, Any]] = {}
        self._is_added = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:  # noqa: ANN401, ARG002
        """Let Lightning validate after the last optimizer step."""
        data = trainer.fit_loop._data_fetcher
        if data is None or not _is_last_step(trainer) or not _has_validation_batches(trainer):
            return
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_check_val_fx(data):
            self._is_added = True
            # The public ``trainer.should_stop = True`` validates, too, but not before ``min_epochs`` or in epochs that
            # ``check_val_every_n_epoch`` leaves out, and it logs a row between the steps of ``log_every_n_steps``.
            loop._should_check_val_fx = lambda data_fetcher: True  # noqa: ARG005 - shadows the method until the end

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Keep the state of early stopping if the validation is added, here or by Lightning after ``max_time``."""
        data = trainer.fit_loop._data_fetcher
        if trainer.should_stop and not self._is_added and data is not None:
            trainer.should_stop = False
            self._is_added = not trainer.fit_loop.epoch_loop._should_check_val_fx(data)
            trainer.should_stop = True
        if self._is_added:
            self._patience = {callback: callback.state_dict() for callback in trainer.early_stopping_callbacks}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Restore the state of early stopping before the checkpoint is saved."""
        for callback, state in self._patience.items():
            callback.load_state_dict(state)
        self._patience = {}

    def state_dict(self) -> dict[str, Any]:
        """Mark a checkpoint saved by the additional validation; a resumed run drops the validation's losses."""
        return {ADDED_VALIDATION: True} if self._is_added else {}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Return to Lightning's intervals; a later fit of the trainer may be longer."""
        vars(trainer.fit_loop.epoch_loop).pop("_should_check_val_fx", None)
        self._is_added = False


def _has_validation_batches(trainer: L.Trainer) -> bool:
    if not trainer.enable_validation:
        return False
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.setup_data()  # does nothing if a validation has run
    trainer.training = True
    return sum(trainer.num_val_batches) > 0


class _AfterSteps(Checkpoint):
    """Calls :meth:`after_step` in the last hook of every optimizer step.

    A validation and the end of an epoch belong to the step before them. A resumed run does not validate again. A
    checkpoint from before the validation would therefore miss its losses for early stopping and for the choice of the
    best checkpoint. The class is a ``Checkpoint``, so that it runs after early stopping and other checkpoint callbacks.
    """

    _last_hook = ""
    _is_validated = False

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Act after a step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:  # noqa: ANN401
        """Find the step's last hook. The gradients of a step that still accumulates are in no checkpoint."""
        loop, data = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        if loop._should_accumulate():
            return
        self._is_validated = data is not None and loop._should_check_val_fx(data)
        self._last_hook = "on_validation_end" if self._is_validated else "on_train_batch_end"
        if loop._num_ready_batches_reached():
            self._last_hook = "on_train_epoch_end"
        self._call_after("on_train_batch_end", trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Act after a step that a validation follows."""
        self._call_after("on_validation_end", trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Act after the last step of an epoch."""
        self._call_after("on_train_epoch_end", trainer, pl_module)

    def _call_after(self, hook: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if hook == self._last_hook:
            self._last_hook = ""
            self.after_step(trainer, pl_module)


class SaveLastStep(_AfterSteps):
    """Saves checkpoints of whole steps, and ``last.ckpt`` after the final step, so that a longer run can resume.

    With ``every_n_train_steps: 1000`` and ``max_steps: 1700``, Lightning would leave step 1000 in ``last.ckpt``, and
    tests would load old weights. If ``max_steps`` ends inside an epoch, Lightning would save when the epoch already
    counts as done: a resumed run would skip the rest of the epoch. A run that a callback or a time limit ends early
    keeps its earlier checkpoint.
    """

    def __init__(self) -> None:
        self._kept: dict[ModelCheckpoint, Any] = {}  # callbacks that must not replace their last checkpoint any more
        self._saves: dict[ModelCheckpoint, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Take over the checkpoint callbacks' work at the end of a batch."""
        for callback in _savers(trainer):
            self._saves[callback] = callback.on_train_batch_end
            callback.on_train_batch_end = lambda *_: None  # type: ignore[method-assign] - shadows the method

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Tell callbacks which step a resumed training has already saved; they would save it again at the end."""
        for callback in _savers(trainer) if trainer.global_step else ():
            callback._last_global_step_saved = trainer.global_step
            callback._last_checkpoint_saved = callback._last_checkpoint_saved or str(trainer.ckpt_path or "")

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let callbacks save the step; save the last optimizer step unless a callback has saved it."""
        for callback, save in self._saves.items():
            save(trainer, pl_module, None, None, 0)
            # Lightning expects a validation after the save, but the validation of this step is over.
            if self._is_validated and callback._defer_save_until_validation:
                callback.on_validation_end(trainer, pl_module)
        if not _is_last_step(trainer):
            return
        for callback in _savers(trainer):
            # The callback knows what it has saved.
            if callback.save_last and not callback._should_skip_saving_checkpoint(trainer):
                step = callback._last_global_step_saved
                callback._last_checkpoint_saved = ""  # or save_last: link would link the checkpoint of an earlier step
                callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
                callback._last_global_step_saved = step  # the end of the epoch may still save the step as the best
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            for callback in _savers(trainer):
                if callback.save_last:
                    self._kept[callback] = callback.save_last
                    callback.save_last = None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Make the last checkpoint the newest file, because ``last`` means the newest."""
        for callback in self._kept:
            if trainer.is_global_zero and Path(callback.last_model_path).is_file():
                Path(callback.last_model_path).touch()
        self._restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Give the callbacks their methods back, and leave the trainer, which counts its checkpoint callbacks."""
        self._restore()
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Give the callbacks their methods back; a trainer may be used again."""
        self._restore()

    def _restore(self) -> None:
        for callback, save_last in self._kept.items():
            callback.save_last = save_last
        for callback in self._saves:
            del callback.on_train_batch_end
        self._kept, self._saves = {}, {}


def _savers(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _is_last_step(trainer: L.Trainer) -> bool:
    loop = trainer.fit_loop.epoch_loop
    ends_epochs = loop.batch_progress.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return (ends_epochs or trainer.global_step == trainer.max_steps) and not loop._should_accumulate()


def _last_path(callback: ModelCheckpoint) -> Path:
    """Return the path of a callback's last checkpoint."""
    assert callback.dirpath is not None
    return Path(callback.dirpath) / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"


def last_checkpoint(trainer: L.Trainer) -> str | None:
    """Return the last checkpoint that a run has written or resumed from; ``None`` without a checkpoint."""
    paths = [callback.last_model_path or callback.best_model_path for callback in _savers(trainer)]
    return next(filter(None, paths), None) or (str(trainer.ckpt_path) if trainer.ckpt_path else None)


class SaveOnSignal(_AfterSteps):
    """Ends training after the current optimizer step when a signal arrives, with an exact checkpoint.

    Handles SIGTERM, SIGINT (Ctrl-C) and, under SLURM, the signal that announces pre-emption (SIGUSR1); the job is then
    requeued if Lightning would requeue it. Lightning's handler saves in the middle of a step and into the working
    directory, from which the next job of any run would resume. A second signal ends the process at once. If a
    validation follows the step, the validation runs before the end. The resulting ``SystemExit`` has a ``message`` and
    the signal's usual exit code in shells. Forked processes end with this exit code.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._signum = 0
        self._message = ""
        self._requeues: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Install the handlers in place of Lightning's."""
        self._forget()
        if threading.current_thread() is not threading.main_thread():
            return
        signals = [signal.SIGTERM, signal.SIGINT]
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            signals.append(environment.requeue_signal or signal.SIGUSR1)
            self._requeues = signals[-1] if environment.auto_requeue else None
        self._before = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signum = signum
        self._restore()
        if rank_zero_only.rank == 0:  # pyright: ignore[reportFunctionMemberAccess]
            # A write without a buffer: a signal may arrive within a buffered write.
            with suppress(OSError, AttributeError):  # standard error may be closed
                os.write(
                    sys.stderr.fileno(),
                    b"finishing the step and saving a checkpoint; send the signal again to stop at once\n",
                )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # Lightning's handler would only record a second SIGTERM.
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default if self._signum else handler)
        self._before = {}

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Save and stop after an optimizer step if any process has received a signal, unless training ends there."""
        ends = _is_last_step(trainer) or (trainer.should_stop and trainer.fit_loop._can_stop_early)
        if not ends and trainer.strategy.reduce_boolean_decision(bool(self._signum), all=False):
            directory = Path(trainer.log_dir or trainer.default_root_dir)
            paths = [_last_path(callback) for callback in _savers(trainer) if callback.dirpath]
            path = str(paths[0] if paths else directory / "checkpoints" / "last.ckpt")
            trainer.save_checkpoint(path)
            self._signum = self._signum or signal.SIGTERM
            self._message = (
                f"stopped by {signal.Signals(self._signum).name} after step {trainer.global_step}; saved {path}"
            )
            if self._signum == self._requeues and trainer.is_global_zero:
                self._message += f"; {_requeue()}"
            trainer._signal_connector.received_sigterm = True  # ends the loop once this step is logged
            if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
                # A forked process ends by Lightning's exception, without hooks. After exit code 0, the parent would
                # wait for a result. The process that ends first makes the parent send SIGTERM to the others.
                SIGTERMException.code = 128 + self._signum  # type: ignore[assignment] - of all its instances
                signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Restore the previous handlers."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Restore the previous handlers; add exit code and message to the exception."""
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


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint plugin with atomic writes and loading without code execution.

    A process that dies while writing leaves the old checkpoint, or no file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:  # noqa: ANN401, ARG002 - Lightning's signature
        """Write a checkpoint.

        Raises:
            ValueError: If the file cannot be written, for lack of space or permission.
        """
        try:
            with atomic_writer(path) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch raises either for a failed write
            reason = write_error_reason(error) or error_reason(error)
            raise ValueError(
                f"checkpoint: {path} cannot be written ({reason}). Make room or choose another runs_dir, "
                "then resume with --resume RUN; earlier checkpoints are as they were."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,  # noqa: ANN401, ARG002 - Lightning's signature
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Load a checkpoint to the CPU: tensors and plain values only, even with ``weights_only=False``.

        Raises:
            ValueError: If the file is missing or damaged, or holds other objects.
        """
        return read_checkpoint(path)
