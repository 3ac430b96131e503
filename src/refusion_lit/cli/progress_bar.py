"""The progress bar of ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import TaskID

from refusion_lit.cli.progress import AnswerProgress
from refusion_lit.decoding import GenerationCallback


class RunProgress(ProgressBar):
    """Shows steps and losses of a training, batches of a validation, and answers of a test or prediction.

    On a terminal they are bars on standard error, which disappear at the end. Elsewhere a training prints a line after
    each validation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._enabled = True
        self._started = (0.0, 0)
        self._clear()

    def _clear(self) -> None:
        self._answers = AnswerProgress(self._console)
        self._bars = self._answers.bars
        self._steps: TaskID | None = None
        self._batches: TaskID | None = None

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all processes but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show bars and lines again."""
        self._enabled = True

    def print(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - Lightning's signature
        """Print above the bars."""
        self._console.print(*args, **options)

    def watch(self, name: str, total: int, finished: int = 0) -> list[GenerationCallback]:
        """Return what shows the answers of one call of ``decode``; for arguments see :class:`AnswerProgress`."""
        return [self._answers.watch(name, total, finished)] if self._enabled else []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the size of the model and the bar of the steps."""
        self._started = (time.monotonic(), trainer.global_step)
        if not self._enabled:
            return
        trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        size = sum(p.numel() for p in pl_module.parameters())
        what = f"{size:,} parameters" if trained == size else f"{trained:,} of {size:,} parameters"
        self.print(f"training {what}", highlight=False)
        self._steps = self._add("training", _num_steps(trainer), trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:  # noqa: ANN401 - Lightning's arguments
        """Move the bar of the steps."""
        if self._steps is not None:
            self._bars.update(self._steps, completed=trainer.global_step, text=self._state(trainer))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Show the bar of the validation's batches."""
        if self._enabled:
            batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
            self._batches = self._add("validation", sum(batches) if isinstance(batches, list) else batches, 0)

    def on_validation_batch_end(self, *_: Any) -> None:  # noqa: ANN401 - Lightning's arguments
        """Move the bar of the validation."""
        if self._batches is not None:
            self._bars.advance(self._batches)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Replace the bar of the validation by a line with the losses."""
        if self._batches is not None:
            self._bars.remove_task(self._batches)
        self._batches = None
        if trainer.state.fn != TrainerFn.FITTING:
            self._stop()
        elif self._enabled and not trainer.sanity_checking:
            total = _num_steps(trainer)
            steps = f"step {trainer.global_step}" + ("" if total is None else f"/{total}")
            self.print(f"{steps}: {self._state(trainer)}", highlight=False, markup=False, soft_wrap=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Remove the bars, and show how the training ended."""
        self._stop()
        if self._enabled:
            seconds = time.monotonic() - self._started[0]
            line = f"trained to step {trainer.global_step} in {timedelta(seconds=round(seconds))}"
            line = ": ".join(filter(None, (line, self._losses(trainer))))
            self.print(line, highlight=False, markup=False, soft_wrap=True)

    def _add(self, name: str, total: float | None, completed: int) -> TaskID:
        """Add a bar, and show the bars if they are not shown yet."""
        self._bars.start()
        bounded = None if total is None or not math.isfinite(total) else total
        return self._bars.add_task(name, total=bounded, completed=completed, text="")

    def _stop(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the arguments of several hooks
        """Remove the bars: before the table of a test, after predictions, and so that an error stands alone."""
        self._bars.stop()
        self._clear()

    on_test_epoch_end = on_predict_end = on_exception = _stop

    def _losses(self, trainer: L.Trainer) -> str:
        shown = trainer.progress_bar_metrics.items()
        return ", ".join(f"{name} {float(value):.4g}" for name, value in shown)

    def _state(self, trainer: L.Trainer) -> str:
        """Return losses, pace and time left."""
        start, first = self._started
        seconds = time.monotonic() - start
        steps = trainer.global_step - first
        total = _num_steps(trainer)
        parts = [self._losses(trainer), f"{steps / seconds:.2f} steps/s" if steps and seconds else ""]
        if total is not None and steps:
            left = timedelta(seconds=round(seconds / steps * (total - trainer.global_step)))
            parts.append(f"{left} left")
        return ", ".join(filter(None, parts))


def _num_steps(trainer: L.Trainer) -> int | None:
    total = trainer.estimated_stepping_batches
    return int(total) if math.isfinite(total) else None
