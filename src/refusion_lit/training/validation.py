"""The validation loss, at mask ratios that are the same in every run, and decoded samples to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from refusion_lit.metrics import TermMeans
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.objectives.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.types import PromptBatch, SpecialTokens

_NUM_STRATA = 16


def corrupt_evenly(objective: Objective, batch: ResponseBatch, special_tokens: SpecialTokens) -> CorruptedBatch:
    """Corrupt a batch with noise and mask ratios that depend on its samples alone.

    Args:
        objective: What is trained.
        batch: Samples; each gets one of 16 mask ratios, evenly spaced in (0, 1).
        special_tokens: The model's.
    """
    strata = torch.remainder(batch.sample_keys, _NUM_STRATA)
    ratio = (strata.double() + 0.5) / _NUM_STRATA
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=-1)
    return objective.corrupt(batch, noise, special_tokens, mask_ratio=ratio)


class ValidationLoss:
    """Means of the loss terms over one pass of validation.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._means: TermMeans | None = None

    def add(self, corrupted: CorruptedBatch, loss: LossOutput) -> None:
        """Add a batch."""
        if self._means is None:
            self._means = TermMeans(corrupted.term_names, corrupted.coefficients).to(self._device)
        self._means.update(loss)

    def means(self, from_first: Callable[[Any], Any]) -> dict[str, Tensor]:
        """Return every term's mean and their weighted ``total`` over all processes; nothing without any sample.

        Args:
            from_first: Returns what the first process passes, on all of them. A process without samples learns the
                terms so and takes part in the sums over processes; the first one has some if any has.
        """
        terms = from_first(self._means and (self._means.names, self._means.coefficients))
        if self._means is None and terms is not None:
            self._means = TermMeans(*terms).to(self._device)
        return {} if self._means is None else self._means.compute()


def text_writers(loggers: Iterable[object]) -> list[Any]:
    """Return the loggers' experiments that take texts."""
    experiments = [getattr(logger, "experiment", None) for logger in loggers]
    return [experiment for experiment in experiments if hasattr(experiment, "add_text")]


def samples_as_text(batch: PromptBatch, responses: Sequence[str]) -> str:
    """Show queries, responses and references as Markdown."""
    return "\n\n".join(
        f"`{example.query}`\n\n    {response}\n\n(reference `{example.response}`)"
        for example, response in zip(batch.examples, responses, strict=True)
    )
