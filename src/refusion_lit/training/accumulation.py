"""The loss of a whole optimizer step, whose batches are computed one after the other and on several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from refusion_lit.objectives.batch import CorruptedBatch, LossOutput


@dataclass(kw_only=True)
class StepLoss:
    """Makes the losses of a step's batches add up to the loss of one batch that holds all their samples.

    Terms have denominators of their own (labelled tokens, samples) that differ from batch to batch, so a mean of the
    batches' means is another loss. The counts depend on the corruption alone, which can be computed beforehand.

    Attributes:
        counts: What each term's sum is divided by, over all batches and processes.
        num_positions: Token positions of all batches and processes.
        num_real: How many of them are no padding.
        sums: Each term's sum over the batches that this process has computed.
        num_left: Batches of the step that this process has still to compute.
    """

    counts: Float[Tensor, " term"]
    num_positions: Float[Tensor, ""]
    num_real: Float[Tensor, ""]
    sums: Float[Tensor, " term"]
    num_left: int

    @classmethod
    def of(cls, batches: Sequence[CorruptedBatch], over_processes: Callable[[Tensor], Tensor]) -> StepLoss:
        """Count a step's batches.

        Args:
            batches: All batches of this process.
            over_processes: Sums a tensor over processes.
        """
        counts = torch.stack([batch.counts for batch in batches]).sum(0).double()
        num_positions = counts.new_full((1,), sum(batch.input_ids.numel() for batch in batches))
        num_real = torch.stack([_num_real(batch) for batch in batches]).sum()[None]
        # One exchange for all figures, and none with the host.
        totals = over_processes(torch.cat((num_positions, num_real.double(), counts)))
        return cls(
            counts=totals[2:],
            num_positions=totals[0],
            num_real=totals[1],
            sums=torch.zeros_like(counts),
            num_left=len(batches),
        )

    def share(self, loss: LossOutput) -> Float[Tensor, ""]:
        """Return a batch's share of the step's loss: shares add up to it over batches and processes."""
        self.sums = self.sums + loss.sums.detach()
        self.num_left -= 1
        return replace(loss, counts=self.counts.to(loss.sums.dtype)).total


def _num_real(batch: CorruptedBatch) -> Tensor:
    """Return how many positions are no padding; all where the objective does not say."""
    return (torch.ones_like(batch.input_ids) if batch.is_real is None else batch.is_real).sum()
