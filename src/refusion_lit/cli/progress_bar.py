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
        self._started = (0.0, 0)
        self.enable()

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all processes but the first."""
        self._bars = AnswerProgress(Console(quiet=True, force_interactive=False))

    def enable(self) -> None:
        """Show bars and lines again."""
        self._bars = AnswerProgress()

    def print(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - Lightning's signature
        """Print above the bars, as it is."""
        plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
        self._bars.console.print(*args, **plain | options)

    def watch(self, name: str, total: int, finished: int = 0) -> list[GenerationCallback]:
        """Return what shows the answers of one call of ``decode``; for arguments see :class:`AnswerProgress`."""
        return [] if self._bars.console.quiet else [self._bars.watch(name, total, finished)]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the size of the model and the bar of the steps."""
        self._started = (time.monotonic(), trainer.global_step)
        trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        size = sum(p.numel() for p in pl_module.parameters())
        what = f"{size:,} parameters" if trained == size else f"{trained:,} of {size:,} parameters"
        self.print(f"training {what}")
        self._steps = self._add("training", trainer.estimated_stepping_batches, trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:  # noqa: ANN401 - Lightning's arguments
        """Move the bar of the steps."""
        self._bars.update(self._steps, completed=trainer.global_step, text=self._state(trainer))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Show the bar of the validation's batches."""
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._batches = self._add("validation", sum(batches) if isinstance(batches, list) else batches)

    def on_validation_batch_end(self, *_: Any) -> None:  # noqa: ANN401 - Lightning's arguments
        """Move the bar of the validation."""
        self._bars.advance(self._batches)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Replace the bar of the validation by a line with the losses."""
        self._bars.remove_task(self._batches)
        if trainer.state.fn != TrainerFn.FITTING:
            self._stop()
        elif not trainer.sanity_checking:
            total = trainer.estimated_stepping_batches
            steps = f"{trainer.global_step}/{int(total)}" if math.isfinite(total) else f"{trainer.global_step}"
            self.print(f"step {steps}: {self._state(trainer)}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Remove the bars, and show how the training ended."""
        self._stop()
        seconds = time.monotonic() - self._started[0]
        line = f"trained to step {trainer.global_step} in {timedelta(seconds=round(seconds))}"
        self.print(": ".join(filter(None, (line, self._losses(trainer)))))

    def _add(self, name: str, total: float, completed: int = 0) -> TaskID:
        """Add a bar, and show the bars if they are not shown yet."""
        self._bars.start()
        return self._bars.add_task(name, total=total if math.isfinite(total) else None, completed=completed, text="")

    def _stop(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the arguments of several hooks
        """Remove the bars: before the table of a test, after predictions, and so that an error stands alone."""
        self._bars.stop()
        self._bars = AnswerProgress(self._bars.console)

    on_test_epoch_end = on_predict_end = on_exception = _stop

    def _losses(self, trainer: L.Trainer) -> str:
        shown = trainer.progress_bar_metrics.items()
        return ", ".join(f"{name} {float(value):.4g}" for name, value in shown)

    def _state(self, trainer: L.Trainer) -> str:
        """Return losses, pace and time left."""
        start, first = self._started
        seconds = time.monotonic() - start
        steps = trainer.global_step - first
        total = trainer.estimated_stepping_batches
        parts = [self._losses(trainer), f"{steps / seconds:.2f} steps/s" if steps and seconds else ""]
        if math.isfinite(total) and steps:
            left = timedelta(seconds=round(seconds / steps * (total - trainer.global_step)))
            parts.append(f"{left} left")
        return ", ".join(filter(None, parts))
