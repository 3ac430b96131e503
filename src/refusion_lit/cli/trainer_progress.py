"""Progress bars and lines of ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console

from refusion_lit.cli.decoding_progress import DecodingProgress
from refusion_lit.decoding import GenerationCallback


class TrainerProgress(ProgressBar):
    """Shows a training's steps and losses, a validation's batches, and answers in a test or prediction.

    On a terminal, bars on standard error show the progress and disappear at the end. A training also prints a line
    after each validation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._validated_step: int | None = None
        self.enable()

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all processes but the first."""
        self._bars = DecodingProgress(Console(quiet=True, force_interactive=False))

    def enable(self) -> None:
        """Show bars and lines again."""
        self._bars = DecodingProgress()

    def print(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - Lightning's signature
        """Print above the bars, without markup."""
        plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
        self._bars.console.print(*args, **plain | options)

    def watch(self, name: str, total: int, finished: int = 0) -> list[GenerationCallback]:
        """Return callbacks that show the answers of one call of ``decode``; see :meth:`DecodingProgress.watch`."""
        return [] if self._bars.console.quiet else [self._bars.watch(name, total, finished)]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the size of the model and show the bar of the steps."""
        trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        size = sum(p.numel() for p in pl_module.parameters())
        self.print(
            f"training {size:,} parameters" if trained == size else f"training {trained:,} of {size:,} parameters"
        )
        self._steps = self._bars.add_bar("training", trainer.estimated_stepping_batches, trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:  # noqa: ANN401 - Lightning's arguments
        """Move the bar of the steps."""
        self._bars.update(self._steps.id, completed=trainer.global_step, text=self._describe(trainer))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Show the bar of the validation's batches."""
        num_batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._batches = self._bars.add_bar("validation", sum(num_batches))

    def on_validation_batch_end(self, *_: Any) -> None:  # noqa: ANN401 - Lightning's arguments
        """Move the validation bar."""
        self._bars.advance(self._batches.id)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Remove the validation bar; within a training, print a line with the losses."""
        self._bars.remove_task(self._batches.id)
        if trainer.state.fn != TrainerFn.FITTING:
            self._stop()
        elif not trainer.sanity_checking:
            self._validated_step = trainer.global_step
            total, seconds_left = self._steps.total, self._steps.time_remaining
            step = f"{trainer.global_step}" if total is None else f"{trainer.global_step}/{total:.0f}"
            time_left = "" if seconds_left is None else f"{timedelta(seconds=seconds_left)} left"
            self.print(f"step {step}: {', '.join(filter(None, (self._describe(trainer), time_left)))}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Remove the bars, and print the last losses. A validation loss from an earlier step has the step beside it."""
        line = f"trained to step {trainer.global_step} in {timedelta(seconds=round(self._steps.elapsed or 0))}"
        self._stop()
        self.print(": ".join(filter(None, (line, _losses(trainer, self._validated_step)))))

    def _describe(self, trainer: L.Trainer) -> str:
        pace = f"{self._steps.speed:.2f} steps/s" if self._steps.speed else ""
        return ", ".join(filter(None, (_losses(trainer), pace)))

    def _stop(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the arguments of several hooks
        """Remove the bars before a test's table, after predictions, and before an error."""
        self._bars.stop()
        self._bars = DecodingProgress(self._bars.console)

    on_test_epoch_end = on_predict_end = on_exception = _stop


def _losses(trainer: L.Trainer, validated_step: int | None = None) -> str:
    """Return the logged losses. A validation loss has its step if training went on after the validation."""
    earlier = f" (step {validated_step})" if validated_step not in (None, trainer.global_step) else ""
    shown = trainer.progress_bar_metrics.items()
    return ", ".join(f"{name} {float(value):.4g}{earlier * name.startswith('val/')}" for name, value in shown)
