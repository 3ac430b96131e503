"""Validation losses, exact over several processes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.draft_figures import NUM_OFFSETS, draft_figures
from refusion_lit.learning.objective import Objective, corrupt_and_check
from refusion_lit.noise import KeyedNoise
from refusion_lit.training.figures import TrainingFigures
from refusion_lit.types import SpecialTokens

_NUM_STRATA = 16


class Validation(L.Callback):
    """Logs validation losses as ``val/...``; validation does not count as training time.

    Args:
        objective: The training objective.
        figures: Measures the speed of training, and leaves out validation.

    Attributes:
        means: The losses so far.
    """

    def __init__(self, objective: Objective, figures: TrainingFigures) -> None:
        self.means = TermMeans(objective.terms)
        self._objective = objective
        self._figures = figures

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Reset the losses."""
        self._started = time.perf_counter()
        self.means.to(pl_module.device).reset()

    def corrupt(self, batch: ResponseBatch, special_tokens: SpecialTokens) -> CorruptedBatch | None:
        """Corrupt a batch; noise and mask ratios depend on its samples only.

        Mask ratios are 16 values, evenly spaced in (0, 1), chosen by the samples' keys.

        Args:
            batch: Samples. Empty on a process without samples, whose loss is ``None``.
            special_tokens: Ids of the tokenizer's special tokens.
        """
        if len(batch.input_ids) == 0:
            return None
        strata = torch.remainder(batch.sample_keys, _NUM_STRATA)
        ratio = (strata.double() + 0.5) / _NUM_STRATA
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=-1)
        return corrupt_and_check(self._objective, batch, noise, special_tokens, mask_ratio=ratio)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Log the losses."""
        # All processes have the same means. Without sync_dist, Lightning would warn; the maximum keeps every digit.
        means = self.means.compute()
        for name, mean in (means | {"loss": means["total"]}).items():  # the loss replaces a term of its name
            if name != "total":
                pl_module.log(f"val/{name}", mean.float(), prog_bar=name == "loss", sync_dist=True, reduce_fx="max")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Exclude the validation from the training time."""
        self._figures.leave_out(time.perf_counter() - self._started)


class TermMeans(Metric):
    """Mean loss by term: total sum divided by total count, not a mean over batches.

    The means do not depend on the number of processes or on the distribution of samples.

    Args:
        terms: Coefficients in ``total`` by the terms' names, as in :attr:`LossOutput.terms`.
    """

    full_state_update = False
    sums: Float[Tensor, " term"]
    counts: Float[Tensor, " term"]
    draft_counts: Float[Tensor, "offset figure"]

    def __init__(self, terms: Mapping[str, float]) -> None:
        super().__init__()
        self.terms = dict(terms)
        for name in ("sums", "counts"):
            self.add_state(name, torch.zeros(len(self.terms), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("draft_counts", torch.zeros(NUM_OFFSETS, 4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: LossOutput | None) -> None:
        """Add a batch's loss; ``None`` on a process without samples."""
        if loss is not None:
            self.sums += loss.sums.detach()
            self.counts += loss.counts.detach()
            if loss.draft_counts is not None:
                self.draft_counts += loss.draft_counts

    def compute(self) -> dict[str, Tensor]:
        """Return means by term and their weighted ``total``, in nats; zero for a term without targets.

        For objectives that train slots, also return the figures of
        :func:`~refusion_lit.learning.draft_figures.draft_figures`.
        """
        loss = LossOutput(sums=self.sums, counts=self.counts, terms=self.terms)
        drafts = draft_figures(self.draft_counts) if self.draft_counts.any() else {}
        return {**loss.named_means(), **drafts, "total": loss.total}
