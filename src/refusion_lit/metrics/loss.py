"""Means of loss terms over many batches and processes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from refusion_lit.objectives.batch import LossOutput


class TermMeans(Metric):
    """Mean of every term of a loss: total of the sums over total of the counts, not a mean of batch means.

    Several processes give what one process gives over all samples, however they share them.

    Args:
        names: The terms, in the order of :attr:`LossOutput.names`.
        coefficients: Factor of each term in ``total``.
    """

    full_state_update = False
    # A process without samples adds nothing, which is no reason for torchmetrics to warn.
    update_called = True  # pyright: ignore[reportAssignmentType]
    sums: Tensor
    counts: Tensor

    def __init__(self, names: tuple[str, ...], coefficients: tuple[float, ...]) -> None:
        super().__init__()
        self.names, self.coefficients = names, coefficients
        self.add_state("sums", torch.zeros(len(names), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(len(names), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: LossOutput) -> None:
        """Add one batch."""
        self.sums += loss.sums.detach().double()
        self.counts += loss.counts.detach().double()

    def compute(self) -> dict[str, Tensor]:
        """Return every term's mean and their weighted ``total``, in nats; zero for a term without targets."""
        loss = LossOutput(sums=self.sums, counts=self.counts, coefficients=self.coefficients, names=self.names)
        return {**loss.named_means(), "total": loss.total}
