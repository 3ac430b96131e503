"""Searches BD3-LM's clipped interval of mask probabilities: the one whose loss varies least between blocks."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch

from refusion_lit.learning.batch import CorruptedBatch, LossOutput
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked
from refusion_lit.types import SpecialTokens
from refusion_lit.utils.require import require


def search_interval(
    objective: BlockMasked,
    trainer: L.Trainer,
    special_tokens: SpecialTokens,
    loss_of: Callable[[CorruptedBatch], LossOutput],
) -> dict[str, float]:
    """Return the limits of the noise interval with the lowest score (BD3-LM, arXiv 2503.09573).

    An interval's score is the variance of the mean token loss over all blocks of a validation batch, summed over the
    batches. All intervals see the same noise, so that the result depends on nothing but weights and data.

    Args:
        objective: The objective, with its candidates.
        trainer: A trainer that fits, with a data module.
        special_tokens: Ids of the tokenizer's special tokens.
        loss_of: Runs the model and returns the loss.
    """
    data, device = getattr(trainer, "datamodule", None), trainer.strategy.root_device
    expected = "none without a data module to validate on"
    require(data is not None, "objective.search_widths", expected, objective.search_widths, "pass a data module to fit")
    candidates = objective.candidates()
    # Count, sum and sum of squares of the block losses, which add up over processes.
    moments = torch.zeros(objective.search_batches, len(candidates), 3, dtype=torch.float64, device=device)
    for own, batch in zip(moments, data.val_dataloader(), strict=False):  # type: ignore[union-attr]
        if len(batch.input_ids) == 0:  # there are fewer samples than processes
            continue
        moved = batch.to(device)
        noise = KeyedNoise.for_samples(moved.sample_keys, seed=0, epoch=-1)
        for index, candidate in enumerate(candidates):
            corrupted = candidate.corrupt(moved, noise, special_tokens)
            loss = loss_of(candidate.by_block(corrupted, moved, special_tokens))
            is_block, means = (loss.counts > 0).double(), loss.means.double()  # the others hold no response tokens
            own[index] = torch.stack((is_block, means * is_block, means.square() * is_block)).sum(-1)
    count, total, squares = trainer.strategy.reduce(moments, reduce_op="sum").unbind(-1)
    variance = (squares - total.square() / count.clamp(min=1)) / (count - 1).clamp(min=1)
    chosen = candidates[int(variance.sum(0).argmin())]
    return {"t_min": chosen.t_min, "t_max": chosen.t_max}
