"""Validation: corruption that is the same in every run, and decoded samples as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.objectives.batch import CorruptedBatch, ResponseBatch
from refusion_lit.types import PromptBatch, SpecialTokens

_NUM_STRATA = 16


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


def text_writers(loggers: Iterable[object]) -> list[Any]:
    """Return the experiments of the loggers that accept text."""
    experiments = [getattr(logger, "experiment", None) for logger in loggers]
    return [experiment for experiment in experiments if hasattr(experiment, "add_text")]


def samples_as_text(batch: PromptBatch, responses: Sequence[str]) -> str:
    """Format queries, responses and references as Markdown."""
    return "\n\n".join(
        f"`{example.query}`\n\n    {response}\n\n(reference `{example.response}`)"
        for example, response in zip(batch.examples, responses, strict=True)
    )
