"""What a training counts between its steps: computed positions, the clock, and the optimizer step under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from refusion_lit.objectives.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.training.accumulation import StepLoss


class TrainingProgress:
    """How far a training is, and how fast.

    Args:
        num_positions: Positions that the run had computed before, if it is resumed.

    Attributes:
        num_positions: Token positions computed so far on all processes, padding included.
    """

    def __init__(self, num_positions: int = 0) -> None:
        self.num_positions: Tensor = torch.tensor(num_positions, dtype=torch.float64)
        self._num_processes = 1
        self._step: StepLoss | None = None
        self._positions_before, self._since, self._paused = 0.0, 0.0, 0.0

    def start(self, device: torch.device, num_processes: int) -> None:
        """Begin a training, or go on with one, behind a step."""
        self.num_positions = self.num_positions.to(device)
        self._num_processes, self._step = num_processes, None
        self._positions_before, self._since = float(self.num_positions), 0.0

    def pause(self) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """Let the clock run on."""
        self._since += (time.perf_counter() - self._paused) * (self._since > 0)

    def step_of(
        self,
        batch: ResponseBatch,
        corrupted: CorruptedBatch,
        corrupt: Callable[[ResponseBatch], CorruptedBatch],
        *,
        num_accumulated: int,
    ) -> StepLoss:
        """Return what the optimizer step of a batch adds up to; the step's first batch counts them all.

        Args:
            batch: The batch.
            corrupted: The batch as the model gets it.
            corrupt: Corrupts the batches that follow in the step.
            num_accumulated: Batches a step.

        Raises:
            ValueError: If a step has several batches, and its first one does not say which.
        """
        if batch.following is None and self._step is not None and self._step.num_left:
            return self._step
        if batch.following is None and num_accumulated > 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches: expected 1 with a loader that does not look ahead, got "
                f"{num_accumulated}; use InstructionDataModule's loader, or one that sets ResponseBatch.following on "
                "the first batch of each step."
            )
        others = [corrupt(other) for other in batch.following or ()]
        self._step = StepLoss.of([corrupted, *others], self._over_processes)
        self.num_positions = self.num_positions + self._step.num_positions
        return self._step

    def figures(self, step: StepLoss, loss: LossOutput) -> dict[str, Tensor]:
        """Return what is logged behind a step, by name, and start measuring the speed of the next steps.

        Args:
            step: The step, all its batches computed.
            loss: The loss of its last batch, whose terms are the step's.
        """
        loss = replace(loss, sums=self._over_processes(step.sums), counts=step.counts)
        figures = {
            **loss.named_means(),
            "loss": loss.total,
            "num_positions": self.num_positions,
            "padding": 1 - step.num_real / step.num_positions,
        }
        now, num_positions = time.perf_counter(), float(self.num_positions)
        if self._since:
            rate = (num_positions - self._positions_before) / (now - self._since)
            figures["positions_per_second"] = torch.tensor(rate, dtype=torch.float64)  # not the default, bf16
        self._positions_before, self._since = num_positions, now
        return figures

    def _over_processes(self, values: Tensor) -> Tensor:
        if self._num_processes > 1:
            torch.distributed.all_reduce(values)
        return values
