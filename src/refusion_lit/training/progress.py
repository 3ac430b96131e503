"""State of a training run between batches: the optimizer step under way, computed positions, and speed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.utils.require import require


class TrainingProgress:
    """Gradient accumulation with exact losses, and the figures that training logs.

    The losses of a step's micro-batches add up to the loss of one batch with all their samples, on all processes. Loss
    terms have denominators of their own (labelled tokens, samples) that differ between micro-batches, so a mean of the
    micro-batches' means would be another loss. Therefore the first micro-batch of a step corrupts all of them and
    sums their counts; each is kept, with the step's counts, until its turn.

    Args:
        num_positions: Number of positions that a resumed run had computed before.

    Attributes:
        num_positions: Number of token positions computed so far on all processes, padding included.
        sample_ids: Ids of the samples in the optimizer step under way, on this process.
    """

    def __init__(self, num_positions: int = 0) -> None:
        self.num_positions: Tensor = torch.tensor(num_positions, dtype=torch.float64)
        self.sample_ids: list[str] = []
        self._num_processes = 1
        self._micro_batches: deque[CorruptedBatch] = deque()
        self._loss: LossOutput | None = None
        self._padding = torch.zeros(())
        self._positions_before, self._since, self._paused = 0.0, 0.0, 0.0

    def start(self, device: torch.device, num_processes: int) -> None:
        """Start or resume training, between two steps."""
        self.num_positions = self.num_positions.to(device)
        self._num_processes = num_processes
        self._micro_batches.clear()
        self._positions_before, self._since = float(self.num_positions), 0.0

    def pause(self) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Restart the clock after :meth:`pause`."""
        self._since += (time.perf_counter() - self._paused) * (self._since > 0)

    def micro_batch(
        self, batch: ResponseBatch, corrupt: Callable[[ResponseBatch], CorruptedBatch], *, num_accumulated: int
    ) -> CorruptedBatch:
        """Return a batch corrupted, with its step's counts, so that its loss is its share of the step's loss.

        Args:
            batch: The batch; the first one of a step names the others (:attr:`ResponseBatch.following`).
            corrupt: Corrupts a batch.
            num_accumulated: Number of micro-batches in a step.

        Raises:
            ValueError: If a step has several micro-batches, but its first one does not name them.
        """
        if batch.following is not None or not self._micro_batches:
            require(
                batch.following is not None or num_accumulated == 1,
                "trainer.accumulate_grad_batches",
                "1 with a loader that does not look ahead",
                num_accumulated,
                "use InstructionDataModule's loader, or one that sets ResponseBatch.following on the first batch of "
                "each step",
            )
            step = (batch, *(batch.following or ()))
            self.sample_ids = [name for each in step for name in each.ids]
            self._begin_step([corrupt(each) for each in step])
        return self._micro_batches.popleft()

    def _begin_step(self, micro_batches: list[CorruptedBatch]) -> None:
        """Sum what the step's micro-batches count, over all processes."""
        counts = torch.stack([batch.counts for batch in micro_batches]).sum(0).double()
        num_positions = counts.new_full((1,), sum(batch.input_ids.numel() for batch in micro_batches))
        num_real = torch.stack([_num_real(batch) for batch in micro_batches]).sum()[None]
        # One all-reduce for all figures; the host waits for none of them.
        totals = self._all_reduced(torch.cat((num_positions, num_real.double(), counts)))
        self.num_positions = self.num_positions + totals[0]
        self._padding = 1 - totals[1] / totals[0]
        self._micro_batches = deque(replace(batch, counts=totals[2:]) for batch in micro_batches)
        self._loss = None

    def add(self, loss: LossOutput) -> bool:
        """Add the loss of a micro-batch; return whether it was the last one of its step."""
        sums = loss.sums.detach() + (0 if self._loss is None else self._loss.sums)
        self._loss = replace(loss, sums=sums)
        return not self._micro_batches

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
        now, num_positions = time.perf_counter(), float(self.num_positions)
        if self._since:
            rate = (num_positions - self._positions_before) / (now - self._since)
            figures["positions_per_second"] = torch.tensor(rate, dtype=torch.float64)  # the default may be bfloat16
        self._positions_before, self._since = num_positions, now
        return figures

    def _all_reduced(self, values: Tensor) -> Tensor:
        if self._num_processes > 1:
            torch.distributed.all_reduce(values)
        return values


def _num_real(batch: CorruptedBatch) -> Tensor:
    """Return the number of positions that are no padding; all where the objective does not say."""
    return (torch.ones_like(batch.input_ids) if batch.is_real is None else batch.is_real).sum()
