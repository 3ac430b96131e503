"""Validation: the loss under a corruption that is the same in every run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.metrics import TermMeans
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.types import SpecialTokens

_NUM_STRATA = 16


class Validation:
    """The mean loss over the validation samples.

    Args:
        objective: The training objective.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._means = TermMeans(objective.terms)

    def start(self, device: torch.device) -> None:
        """Begin a validation."""
        self._means = TermMeans(self._objective.terms).to(device)

    def step(
        self, batch: ResponseBatch, special_tokens: SpecialTokens, loss_of: Callable[[CorruptedBatch], LossOutput]
    ) -> None:
        """Add a batch's loss at fixed mask ratios, which are the same in every run.

        Args:
            batch: The batch; empty on a process without samples.
            special_tokens: Ids of the tokenizer's special tokens.
            loss_of: Runs the model and returns the loss.
        """
        is_empty = len(batch.input_ids) == 0
        self._means.update(None if is_empty else loss_of(corrupt_evenly(self._objective, batch, special_tokens)))

    def figures(self) -> dict[str, Tensor]:
        """Return the means by the names under which they are logged; all processes must call this together."""
        means = self._means.compute()
        return {"val/loss": means.pop("total").float(), **{f"val/{name}": mean.float() for name, mean in means.items()}}


def corrupt_evenly(objective: Objective, batch: ResponseBatch, special_tokens: SpecialTokens) -> CorruptedBatch:
    """Corrupt a batch with noise and mask ratios that depend on its samples only.

    Args:
        objective: The training objective.
        batch: Samples; each gets one of 16 mask ratios, evenly spaced in (0, 1).
        special_tokens: Ids of the tokenizer's special tokens.
    """
    strata = torch.remainder(batch.sample_keys, _NUM_STRATA)
    ratio = (strata.double() + 0.5) / _NUM_STRATA
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=-1)
    return objective.corrupt(batch, noise, special_tokens, mask_ratio=ratio)


def is_whole(strategy: Strategy) -> bool:
    """Whether each process holds all weights and can run the model without the others."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
