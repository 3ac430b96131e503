"""Corrects Lightning's counters at a resumption, so that a run may be stopped any number of times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

_COUNTERS = ("ready", "started", "processed", "completed")
"""Lightning's counters of a batch or an epoch, in the order of their increments."""


def count_finished_epochs(fit_loop: Mapping[str, Any]) -> int:
    """Return the number of epochs whose batches are all done.

    Args:
        fit_loop: Lightning's state of the fit loop, from a checkpoint's ``loops``.
    """
    return _current_epoch(fit_loop) + bool(fit_loop["epoch_loop.batch_progress"]["is_last_batch"])


def _current_epoch(fit_loop: Mapping[str, Any]) -> int:
    """Return the last batch's epoch index."""
    current = fit_loop["epoch_progress"]["current"]
    # In the hooks at the end of an epoch, the epoch counts as processed, but not as completed.
    return current["processed"] - (current["completed"] < current["processed"])


def correct_counters(fit_loop: dict[str, Any]) -> None:
    """Rewrite a fit loop's state, so that Lightning resumes from the same point after any number of stops.

    The counters depend on the hook that saves the checkpoint. Lightning 2.6 distinguishes six combinations and counts
    epochs wrongly after some combinations: a second stop at the end of an epoch then skips an epoch. This function
    produces only the two combinations that Lightning resumes rightly: a batch in mid-epoch whose hooks are about to
    end, and an epoch that is about to start.

    Args:
        fit_loop: Lightning's state of the loop, from a checkpoint's ``loops``; changed in place.
    """
    batches = fit_loop["epoch_loop.batch_progress"]
    epoch = _current_epoch(fit_loop)
    is_after_epoch = fit_loop["epoch_progress"]["current"]["processed"] > epoch
    num_finished = count_finished_epochs(fit_loop)
    # Lightning counts a step for the loggers after the validation that may follow the step.
    state = fit_loop["epoch_loop.state_dict"]
    if num_finished > epoch:
        epochs = dict.fromkeys(_COUNTERS, num_finished)
        batches["current"] = dict.fromkeys(_COUNTERS, 0)
        batches["total"]["completed"] = batches["total"]["processed"]
        batches["is_last_batch"] = False
        state["_batches_that_stepped"] += not is_after_epoch
    else:
        epochs = {"ready": epoch + 1, "started": epoch + 1, "processed": epoch, "completed": epoch}
        for progress in (batches["current"], batches["total"]):
            progress["completed"] = progress["processed"] - 1
        state["_batches_that_stepped"] -= is_after_epoch
    for name in ("current", "total"):
        fit_loop["epoch_progress"][name] = dict(epochs)


def begin_resumed_epoch(trainer: L.Trainer) -> None:
    """Complete Lightning's restoring before a resumed training's first batch; do nothing in a new training.

    Call this function in ``on_train_start``.
    """
    # With max_epochs, the learning rate schedule needs the number of batches, so Lightning creates the loader before it
    # reads the loader's state from the checkpoint. Lightning then never passes the state on to the loader.
    trainer.fit_loop._load_combined_loader_states()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):  # Lightning calls it at the beginning of an epoch alone
            callback.on_train_epoch_start(trainer)
    loop = trainer.fit_loop.epoch_loop
    if loop.restarting and loop.batch_progress.current.ready == 0:
        loop.restarting = False  # the epoch has not begun
