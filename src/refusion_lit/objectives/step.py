"""The loss of a whole optimizer step, whose batches are computed one after the other and on several processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from refusion_lit.types import LossOutput


@dataclass(kw_only=True)
class StepLoss:
    """Makes the losses of a step's batches add up to the loss of one batch that holds all their samples.

    Terms have denominators of their own (labelled tokens, samples) that differ from batch to batch, so a mean of the
    batches' means is another loss. The counts depend on the corruption alone, which can be computed beforehand.

    Attributes:
        counts: What each term's sum is divided by, over all batches and processes.
        num_left: Batches of the step that are still to be computed on this process.
        sums: Each term's sum over the batches of this process so far; ``None`` before the first.
    """

    counts: Float[Tensor, " term"]
    num_left: int
    sums: Float[Tensor, " term"] | None = None

    def share(self, loss: LossOutput) -> Float[Tensor, ""]:
        """Return a batch's share of the step's loss: shares add up to it over batches and processes."""
        sums = loss.sums.detach()
        self.sums = sums if self.sums is None else self.sums + sums
        self.num_left -= 1
        return replace(loss, counts=self.counts.to(loss.sums.dtype)).total
