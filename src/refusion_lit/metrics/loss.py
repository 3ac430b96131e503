"""Means of loss terms over many batches and processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

from refusion_lit.learning.batch import LossOutput


class TermMeans(Metric):
    """Mean of every term of a loss: the total of the sums over the total of the counts, not a mean of batch means.

    Several processes get the means of one process over all samples, however the samples are distributed.

    Args:
        terms: Coefficient of each term in ``total``, by the term's name, as in :attr:`LossOutput.terms`.
    """

    full_state_update = False
    sums: Float[Tensor, " term"]
    counts: Float[Tensor, " term"]

    def __init__(self, terms: Mapping[str, float]) -> None:
        super().__init__()
        self.terms = dict(terms)
        for name in ("sums", "counts"):
            self.add_state(name, torch.zeros(len(self.terms), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: LossOutput | None) -> None:
        """Add a batch; ``None`` on a process that has no sample in it."""
        if loss is not None:
            self.sums += loss.sums.detach()
            self.counts += loss.counts.detach()

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of every term and their weighted ``total``, in nats; zero for a term without targets."""
        loss = LossOutput(sums=self.sums, counts=self.counts, terms=self.terms)
        return {**loss.named_means(), "total": loss.total}
