"""State of a training run between batches: the optimizer step under way, computed positions, and speed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, LossOutput


class TrainingProgress:
    """Gradient accumulation with exact losses, and the figures that training logs.

    The losses of a step's micro-batches add up to the loss of one batch with all their samples, on all processes. Loss
    terms have denominators of their own (labelled tokens, samples) that differ between micro-batches, so a mean of the
    micro-batches' means would be another loss. Therefore all micro-batches of a step are corrupted before the first
    one runs, and each gets the counts of the whole step as its denominators.

    Attributes:
        num_positions: Number of token positions computed so far on all processes, padding included; a resumed run sets
            what it had computed before.
        sample_ids: Ids of the samples in the optimizer step under way, on this process.
    """

    def __init__(self) -> None:
        self.num_positions = torch.zeros((), dtype=torch.float64)
        self.sample_ids: list[str] = []
        self._micro_batches: deque[CorruptedBatch] = deque()
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
        """Leave out time that was not training, as in a validation."""
        self._since += seconds * (self._since > 0)

    def begin_step(self, micro_batches: Sequence[CorruptedBatch], sample_ids: list[str]) -> None:
        """Begin an optimizer step: sum what its micro-batches count, over all processes.

        Args:
            micro_batches: This process's micro-batches of the step, in order.
            sample_ids: Ids of their samples.
        """
        counts = torch.stack([batch.counts for batch in micro_batches]).sum(0).double()
        num_positions = counts.new_full((1,), sum(batch.input_ids.numel() for batch in micro_batches))
        # Where the objective does not say which positions are no padding, all count.
        real = [torch.ones_like(each.input_ids) if each.is_real is None else each.is_real for each in micro_batches]
        num_real = torch.stack([each.sum() for each in real]).sum()[None]
        # One all-reduce for all figures; the host waits for none of them.
        totals = self._all_reduced(torch.cat((num_positions, num_real.double(), counts)))
        self.num_positions = self.num_positions + totals[0]
        self.sample_ids = sample_ids
        self._padding = 1 - totals[1] / totals[0]
        self._micro_batches = deque(replace(batch, counts=totals[2:]) for batch in micro_batches)
        self._loss = None

    def next_micro_batch(self) -> CorruptedBatch:
        """Return the step's next micro-batch with the step's counts: its loss is its share of the step's loss."""
        return self._micro_batches.popleft()

    def add(self, loss: LossOutput) -> None:
        """Add the loss of a micro-batch."""
        sums = loss.sums.detach() + (0 if self._loss is None else self._loss.sums)
        self._loss = replace(loss, sums=sums)

    @property
    def loss(self) -> Tensor:
        """The step's loss so far, of this process's samples."""
        assert self._loss is not None
        return self._loss.total

    def figures(self) -> dict[str, Tensor]:
        """Return what is logged after a step, by name; measures the speed since the last call."""
        assert self._loss is not None
        loss = replace(self._loss, sums=self._all_reduced(self._loss.sums))
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

    def _all_reduced(self, values: Tensor) -> Tensor:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(values)
        return values
