"""A callback that saves the last step, which Lightning leaves out where no interval of checkpoints ends with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint


class SaveLastStep(Checkpoint):
    """Lets ``last.ckpt`` be that of the end of training.

    With ``every_n_train_steps: 1000`` and ``max_steps: 1700`` Lightning would leave the weights of step 1000 there, and
    tests would be of these. Saved in the last step, not after it, so that a longer training resumes exactly. A training
    that ends early, by a callback or a time limit, keeps what was saved before. It is a ``Checkpoint`` so that it runs
    after the others and sees what they have saved.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:  # noqa: ANN401, ARG002
        """Save after the last optimizer step unless that is done, or is about to be."""
        loop = trainer.fit_loop.epoch_loop
        is_last_batch = loop.batch_progress.is_last_batch
        ends_epochs = is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if not (ends_epochs or trainer.global_step == trainer.max_steps) or loop._should_accumulate():
            return
        data = trainer.fit_loop._data_fetcher
        validates = data is not None and loop._should_check_val_fx(data)
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint) or not callback.save_last:
                continue
            period = callback._every_n_epochs
            is_due = period and (trainer.current_epoch + 1) % period == 0 and (validates or is_last_batch)
            if not is_due and not callback._should_skip_saving_checkpoint(trainer):  # which knows what it has saved
                path = str(last_path(callback))
                callback.last_model_path = path  # first, since it is in the checkpoint, by which it is found
                trainer.save_checkpoint(path, callback.save_weights_only)
                # Or, where nothing was saved before, Lightning would replace it after the step, when the epoch counts
                # as done and the rest of its samples would be left out on resuming.
                callback._last_checkpoint_saved = path


def last_path(callback: ModelCheckpoint) -> Path:
    """Return where a callback keeps its last checkpoint."""
    assert callback.dirpath is not None
    return Path(callback.dirpath) / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
