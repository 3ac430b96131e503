"""Gradient accumulation: an optimizer step's micro-batches, with the step's denominators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch


class OptimizerStep:
    """All micro-batches of an optimizer step on this process.

    The micro-batches' losses add up to the loss of a single batch with all samples on all processes. The denominators
    (labelled tokens or samples) differ between micro-batches, so a mean of means would be a different loss.
    :meth:`begin` therefore takes all corrupted micro-batches before the first one runs, and every micro-batch gets the
    whole step's counts as denominators.

    Args:
        batches: Clean micro-batches on this process, in order.

    Attributes:
        num_positions: Number of token positions in the step on all processes, padding included.
        padding: Share of padding among these positions.

    Examples:
        >>> batch = ResponseBatch.from_pairs([([5], [6, 7])], ids=["a"])
        >>> OptimizerStep([batch, batch]).sample_ids
        ['a', 'a']
    """

    def __init__(self, batches: Sequence[ResponseBatch]) -> None:
        self.batches = tuple(batches)
        self.num_positions = torch.zeros(())
        self.padding = torch.zeros(())
        self._corrupted: list[CorruptedBatch | None] = []

    @property
    def sample_ids(self) -> list[str]:
        """The samples' ids on this process."""
        return [name for batch in self.batches for name in batch.ids]

    def begin(self, corrupted: Sequence[CorruptedBatch]) -> None:
        """Sum the counts over all micro-batches and processes.

        Args:
            corrupted: Corrupted micro-batches, in order.
        """
        counts = torch.stack([batch.counts for batch in corrupted]).sum(0).double()
        num_positions = counts.new_full((1,), sum(batch.input_ids.numel() for batch in corrupted))
        # Objectives that do not mark padding count all positions as real.
        real = [torch.ones_like(batch.input_ids) if batch.is_real is None else batch.is_real for batch in corrupted]
        num_real = torch.stack([mask.sum() for mask in real]).sum()[None]
        # A single all-reduce for all figures, and the host waits for no figure.
        totals = all_reduce(torch.cat((num_positions, num_real.double(), counts)))
        self.num_positions = totals[0]
        self.padding = 1 - totals[1] / totals[0]
        self._corrupted = [replace(batch, counts=totals[2:]) for batch in corrupted]

    def take(self, index: int) -> CorruptedBatch:
        """Remove and return a corrupted micro-batch, with the step's counts.

        Args:
            index: The micro-batch's index in the step.
        """
        corrupted = self._corrupted[index]
        assert corrupted is not None, "a micro-batch runs once"
        self._corrupted[index] = None
        return corrupted


@dataclass
class MicroBatch:
    """A micro-batch in an optimizer step.

    Attributes:
        step: The optimizer step.
        index: The micro-batch's index in the step.
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
        """Return the micro-batch itself: the whole step moves to the device when it is corrupted."""
        return self


def group_into_steps(batches: Iterator[ResponseBatch], num_remaining: Callable[[], int]) -> Iterator[MicroBatch]:
    """Yield micro-batches; reads a whole optimizer step ahead.

    Args:
        batches: Clean micro-batches.
        num_remaining: Returns the number of micro-batches that remain in the current step.
    """
    while group := tuple(islice(batches, num_remaining())):
        step = OptimizerStep(group)
        for index in range(len(group)):
            yield MicroBatch(step, index)


def all_reduce(values: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place, and return it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values
