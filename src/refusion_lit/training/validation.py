"""Validation: the loss under a corruption that is the same in every run, and decoded samples as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from refusion_lit.evaluation.loop import Evaluation
from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.metrics import TermMeans
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.text_model import TextModel
from refusion_lit.types import PromptBatch, SpecialTokens

_NUM_STRATA = 16


class Validation:
    """The mean loss over the validation samples, and a few decoded samples.

    Args:
        objective: The training objective.
        evaluation: Decodes the samples.
    """

    def __init__(self, objective: Objective, evaluation: Evaluation) -> None:
        self._objective = objective
        self._evaluation = evaluation
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

    def log_samples(self, trainer: L.Trainer, model: TextModel) -> None:
        """Decode a few samples with the first decoder and log them as text, where a logger takes text."""
        data = getattr(trainer, "datamodule", None)
        writers = text_writers(trainer.loggers)
        num_samples = self._evaluation.options.num_logged_samples
        if data is None or not writers or not num_samples:
            return
        try:
            model = self._evaluation.pair(model)
            decoder = next(iter(self._evaluation.decoders(model).values()))
            if decoder.requirements().mismatches(model.model_for(decoder).traits):
                return
            batch: PromptBatch = data.sample_prompts(num_samples)
            responses = [row.text for row in self._evaluation.decode(model, decoder, batch.prompts).rows]
        except ValueError as error:  # long prompts, or templates that the decoder cannot keep
            rank_zero_warn(f"no samples are logged ({error}); set model.decoding.num_logged_samples to 0.")
            return
        for writer in writers:
            writer.add_text("samples", samples_as_text(batch, responses), trainer.global_step)


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


def is_whole(strategy: Strategy) -> bool:
    """Whether each process holds all weights and can run the model without the others."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
