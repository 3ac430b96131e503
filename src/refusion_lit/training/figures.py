"""The state of training between batches: computed positions, the current step's loss, and speed."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from refusion_lit.learning.batch import LossOutput
from refusion_lit.learning.step import OptimizerStep, all_reduce


class TrainingFigures:
    """Counts computed positions, sums losses, and makes the figures that training logs.

    Attributes:
        num_positions: Number of token positions computed so far on all processes, padding included. A resumed run
            continues the interrupted run's number.
        sample_ids: Ids of the current step's samples on this process.
    """

    def __init__(self) -> None:
        self.num_positions = torch.zeros((), dtype=torch.float64)
        self.sample_ids: list[str] = []
        self._loss: LossOutput | None = None
        self._padding = torch.zeros(())
        self._positions_before = 0.0
        self._since = 0.0

    def start(self, device: torch.device) -> None:
        """Start or resume training, between two steps."""
        self.num_positions = self.num_positions.to(device)
        self.sample_ids = []
        self._positions_before = float(self.num_positions)
        self._since = 0.0

    def leave_out(self, seconds: float) -> None:
        """Exclude time without training, such as a validation."""
        self._since += seconds * (self._since > 0)

    def begin_step(self, step: OptimizerStep) -> None:
        """Count an optimizer step's positions, after corruption."""
        self.num_positions = self.num_positions + step.num_positions
        self.sample_ids = step.sample_ids
        self._padding = step.padding
        self._loss = None

    def add(self, loss: LossOutput) -> None:
        """Add a micro-batch's loss."""
        sums = loss.sums.detach() + (0 if self._loss is None else self._loss.sums)
        self._loss = replace(loss, sums=sums)

    @property
    def loss(self) -> Tensor:
        """The step's loss so far on this process."""
        assert self._loss is not None
        return self._loss.total

    def compute(self) -> dict[str, Tensor]:
        """Return a step's figures by name; measures the speed since the last call."""
        assert self._loss is not None
        loss = replace(self._loss, sums=all_reduce(self._loss.sums))
        figures = {
            **loss.named_means(),
            "loss": loss.total,
            "num_positions": self.num_positions,
            "padding": self._padding,
        }
        now = time.perf_counter()
        num_positions = float(self.num_positions)
        if self._since:
            rate = (num_positions - self._positions_before) / (now - self._since)
            figures["positions_per_second"] = torch.tensor(rate, dtype=torch.float64)  # the default may be bfloat16
        self._positions_before = num_positions
        self._since = now
        return figures
