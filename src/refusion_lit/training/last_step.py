"""A callback that saves the last step, which Lightning leaves out where no interval of checkpoints ends with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint


class SaveLastStep(Checkpoint):
    """Lets ``last.ckpt`` be that of the end of training, from which a longer one resumes exactly.

    With ``every_n_train_steps: 1000`` and ``max_steps: 1700`` Lightning would leave the weights of step 1000 there, and
    tests would be of these. Where ``max_steps`` ends inside an epoch, it would save after the step, when the epoch
    counts as done, and the rest of its samples would be left out on resuming. A training that ends early, by a callback
    or a time limit, keeps what was saved before. It is a ``Checkpoint`` so that it runs after the others and sees what
    they have saved.
    """

    def __init__(self) -> None:
        self._kept: dict[ModelCheckpoint, Any] = {}  # callbacks that must not replace their last checkpoint any more

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:  # noqa: ANN401, ARG002
        """Save after the last optimizer step unless that is done."""
        if not _is_last_step(trainer):
            return
        for callback in _callbacks(trainer):
            if not callback._should_skip_saving_checkpoint(trainer):  # which knows what it has saved
                path = str(last_path(callback))
                callback.last_model_path = path  # first, since it is in the checkpoint, by which it is found
                trainer.save_checkpoint(path, callback.save_weights_only)
                callback._last_checkpoint_saved = path  # or Lightning would replace it at the end
        data = trainer.fit_loop._data_fetcher
        if data is None or not trainer.fit_loop.epoch_loop._should_check_val_fx(data):
            self._keep(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Keep what was saved with the figures of the last validation."""
        if not trainer.sanity_checking and trainer.state.fn == "fit" and _is_last_step(trainer):
            self._keep(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Let the last checkpoint be the newest, which is what ``last`` means."""
        for callback, save_last in self._kept.items():
            callback.save_last = save_last
            if trainer.is_global_zero and last_path(callback).is_file():
                last_path(callback).touch()
        self._kept.clear()

    def _keep(self, trainer: L.Trainer) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            for callback in _callbacks(trainer):
                self._kept[callback], callback.save_last = callback.save_last, None


def _callbacks(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint) and each.save_last]


def _is_last_step(trainer: L.Trainer) -> bool:
    loop = trainer.fit_loop.epoch_loop
    ends_epochs = loop.batch_progress.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return (ends_epochs or trainer.global_step == trainer.max_steps) and not loop._should_accumulate()


def last_path(callback: ModelCheckpoint) -> Path:
    """Return where a callback keeps its last checkpoint."""
    assert callback.dirpath is not None
    return Path(callback.dirpath) / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
