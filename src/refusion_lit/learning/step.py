"""Gradient accumulation: the micro-batches of an optimizer step, their denominators, and the scale of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch


class OptimizerStep:
    """All micro-batches of one optimizer step on this process.

    The losses of the micro-batches add up to the loss of one batch with all samples of the step, on all processes. Loss
    terms have denominators (labelled tokens or samples) that differ between micro-batches, so a mean of means would be
    another loss. Therefore :meth:`begin` takes all corrupted micro-batches before the first one runs, and every
    micro-batch gets the counts of the whole step as its denominators.

    Args:
        batches: This process's clean micro-batches of the step, in order.

    Attributes:
        num_positions: Number of token positions that the step computes on all processes, padding included.
        padding: Share of these positions that hold padding.
    """

    def __init__(self, batches: Sequence[ResponseBatch]) -> None:
        self.batches = tuple(batches)
        self.num_positions = torch.zeros(())
        self.padding = torch.zeros(())
        self._corrupted: list[CorruptedBatch | None] = []

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the samples of the step, on this process."""
        return [name for batch in self.batches for name in batch.ids]

    def begin(self, corrupted: Sequence[CorruptedBatch]) -> None:
        """Sum the counts of all micro-batches over all processes.

        Args:
            corrupted: The micro-batches as the model reads them, in order.
        """
        counts = torch.stack([batch.counts for batch in corrupted]).sum(0).double()
        num_positions = counts.new_full((1,), sum(batch.input_ids.numel() for batch in corrupted))
        # Where the objective does not mark padding, all positions count as real.
        real = [torch.ones_like(batch.input_ids) if batch.is_real is None else batch.is_real for batch in corrupted]
        num_real = torch.stack([mask.sum() for mask in real]).sum()[None]
        # One all-reduce for all figures, and the host waits for none of them.
        totals = all_reduce(torch.cat((num_positions, num_real.double(), counts)))
        self.num_positions = totals[0]
        self.padding = 1 - totals[1] / totals[0]
        self._corrupted = [replace(batch, counts=totals[2:]) for batch in corrupted]

    def take(self, index: int) -> CorruptedBatch:
        """Return a corrupted micro-batch with the counts of the step, and release its memory here.

        Args:
            index: Index of the micro-batch in the step.
        """
        corrupted = self._corrupted[index]
        assert corrupted is not None, "a micro-batch runs once"
        self._corrupted[index] = None
        return corrupted

    @staticmethod
    def scale(num_accumulated: int, world_size: int) -> int:
        """Return the factor of a micro-batch's loss that undoes the means of Lightning and of the processes.

        Args:
            num_accumulated: ``trainer.accumulate_grad_batches``, by which Lightning divides every loss.
            world_size: Number of processes, over which gradients are averaged.
        """
        return num_accumulated * world_size


@dataclass
class MicroBatch:
    """A micro-batch of an optimizer step.

    Attributes:
        step: The step, with all of its micro-batches.
        index: Index of this micro-batch.
    """

    step: OptimizerStep
    index: int

    @property
    def batch(self) -> ResponseBatch:
        """The clean micro-batch."""
        return self.step.batches[self.index]

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        return self.index + 1 == len(self.step.batches)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:  # noqa: ARG002
        """Return the micro-batch itself: a whole step moves to the device when it is corrupted."""
        return self


def group_into_steps(batches: Iterator[ResponseBatch], num_left: Callable[[], int]) -> Iterator[MicroBatch]:
    """Yield micro-batches, looking ahead by one optimizer step.

    Args:
        batches: Clean micro-batches.
        num_left: Returns the number of micro-batches from the next one to the end of its step.
    """
    while group := tuple(islice(batches, num_left())):
        step = OptimizerStep(group)
        for index in range(len(group)):
            yield MicroBatch(step, index)


def all_reduce(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes; the tensor itself changes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values
