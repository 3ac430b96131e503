"""Masks that learn the model's own next-token distribution instead of one token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput
from refusion_lit.learning.objective import Head, map_chunks
from refusion_lit.objectives import MaskWindows


@dataclass(frozen=True, kw_only=True)
class SoftWindows(MaskWindows):
    """:class:`MaskWindows` whose masks are taught by the same forward's next-token predictions of their places.

    A mask at position p learns what the text token at p - 1 predicts, without a gradient to the teacher. Validation
    reports the cross-entropies with the text, as MaskWindows does.

    Attributes:
        soft_share: Share of the distribution in a mask's target, in [0, 1]; the rest is the text's token.
    """

    ranges = {"soft_share": "[0, 1]"}
    soft_share: float = 0.9

    def loss(self, hidden: Float[Tensor, "batch token hidden"], head: Head, corrupted: CorruptedBatch) -> LossOutput:
        """Compute the loss; see :meth:`Objective.loss`."""
        if not torch.is_grad_enabled():
            return super().loss(hidden, head, corrupted)
        is_mask = (corrupted.terms == 1) & (corrupted.labels != IGNORE_INDEX)
        text = super().loss(
            hidden, head, replace(corrupted, labels=corrupted.labels.masked_fill(is_mask, IGNORE_INDEX))
        )
        states = hidden.flatten(0, 1)
        masks, teachers = is_mask.flatten().nonzero()[:, 0], teacher_columns(corrupted)[is_mask]

        def chunk_sum(logits: Tensor, taught_by: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            with torch.no_grad():
                soft = head(taught_by).to(logits.dtype).softmax(-1)
            hard = F.cross_entropy(logits, labels, reduction="none")
            losses = (1 - self.soft_share) * hard + self.soft_share * F.cross_entropy(logits, soft, reduction="none")
            return (losses * weights).sum()

        others = states[teachers].detach(), corrupted.labels[is_mask], corrupted.weights[is_mask]
        sums = map_chunks(chunk_sum, head, states[masks], *others, chunk_size=self.chunk_size)
        return replace(text, sums=torch.stack((text.sums[0], torch.stack(sums).sum())))


def teacher_columns(corrupted: CorruptedBatch) -> Int[Tensor, "batch token"]:
    """Return the index, in the flattened batch, of the text token before each position, packed rows included."""
    assert corrupted.draft_offsets is not None
    column = torch.arange(corrupted.input_ids.numel(), device=corrupted.input_ids.device)
    column = column.view_as(corrupted.input_ids)
    begins = (corrupted.position_ids == 0) & (corrupted.draft_offsets < 0)
    start = column.where(begins, -1).cummax(1).values
    return start + corrupted.position_ids - 1
