"""Stops a training whose loss or gradient is not finite, before the optimizer spoils the weights."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

_NUM_SHOWN = 4


def check_finite(trainer: L.Trainer, loss: Tensor, gradient_norm: Tensor, sample_ids: Sequence[str]) -> None:
    """Stop all processes if one has a loss or gradient that is infinite or not a number.

    A float16 run with a loss scaler skips steps with infinite gradients itself and lowers the scale, so only its loss
    is checked.

    Args:
        trainer: The trainer, before an optimizer step.
        loss: The step's loss on this process.
        gradient_norm: Norm of the step's gradient.
        sample_ids: Ids of the step's samples on this process.

    Raises:
        ValueError: Naming step, samples and the last checkpoint.
    """
    is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    values = {"loss": loss} if is_scaled else {"loss": loss, "gradient norm": gradient_norm}
    figures = dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
    wrong = [f"{name} {value}" for name, value in figures.items() if not abs(value) < float("inf")]
    if not trainer.strategy.reduce_boolean_decision(bool(wrong), all=False):
        return
    what = ", ".join(wrong) or "finite figures here, but not on another process"
    shown = ", ".join(sample_ids[:_NUM_SHOWN]) + (
        f" and {len(sample_ids) - _NUM_SHOWN} more" if len(sample_ids) > _NUM_SHOWN else ""
    )
    raise ValueError(
        f"fit: expected a finite loss and gradient, got {what} at step {trainer.global_step + 1} (samples {shown}). "
        f"The last checkpoint is {last_checkpoint(trainer) or 'none'}. Lower the learning rate, set "
        "trainer.gradient_clip_val, or look at these samples."
    )


def last_checkpoint(trainer: L.Trainer) -> str | None:
    """Return the checkpoint that a training has written or resumed from last, ``None`` without one."""
    paths = [
        callback.last_model_path or callback.best_model_path
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    return next(filter(None, paths), None) or (str(trainer.ckpt_path) if trainer.ckpt_path else None)
