"""Validation: the loss under a corruption that is the same in every run, and decoded samples as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from refusion_lit.evaluation.hooks import EvaluationHooks
from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.metrics import TermMeans
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Objective
from refusion_lit.training.progress import TrainingProgress
from refusion_lit.types import PromptBatch, SpecialTokens

_NUM_STRATA = 16


class ValidationHooks(EvaluationHooks):
    """The LightningModule's hooks for validation; the subclass trains."""

    objective: Objective
    _progress: TrainingProgress

    def __init__(self) -> None:
        super().__init__()
        self._validation: TermMeans | None = None

    def loss(self, corrupted: CorruptedBatch) -> LossOutput:
        """Run the backbone and return the loss."""
        raise NotImplementedError

    def on_validation_start(self) -> None:
        """Stop the clock of training."""
        self._progress.pause()
        self._validation = TermMeans(self.objective.terms).to(self.device)

    def on_validation_end(self) -> None:
        """Restart the clock of training."""
        self._progress.resume()

    def validation_step(self, batch: ResponseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Add a batch's loss at fixed mask ratios, which are the same in every run."""
        assert self._validation is not None
        if len(batch.input_ids) == 0:  # there are fewer samples than processes
            self._validation.update(None)
            return
        corrupted = corrupt_evenly(self.objective, batch, self.model.special_tokens)
        self._validation.update(self.loss(corrupted))

    def on_validation_epoch_end(self) -> None:
        """Log the validation losses and a few decoded samples."""
        assert self._validation is not None
        means = self._validation.compute()
        self.log("val/loss", means.pop("total").float(), prog_bar=True)
        self.log_dict({f"val/{name}": mean.float() for name, mean in means.items()})
        if not self.trainer.sanity_checking and self.trainer.is_global_zero and is_whole(self.trainer.strategy):
            self._log_samples()

    def _log_samples(self) -> None:
        module = getattr(self.trainer, "datamodule", None)
        writers = text_writers(self.loggers)
        num_samples, decoder = self.decoding.num_logged_samples, next(iter(self.decoders.values()))
        if module is None or not writers or not num_samples:
            return
        try:
            setup = self.decoding_setup()
            if decoder.requirements().mismatches(setup.model.model_for(decoder).traits):
                return
            batch: PromptBatch = module.sample_prompts(num_samples)
            responses = [row.text for row in setup.decode(decoder, batch.prompts).rows]
        except ValueError as error:  # long prompts, or templates that the decoder cannot keep
            rank_zero_warn(f"no samples are logged: {error}")
            return
        for writer in writers:
            writer.add_text("samples", samples_as_text(batch, responses), self.global_step)


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
