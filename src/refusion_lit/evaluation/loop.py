"""Test and prediction: prompts are answered, answers written at once, scored and counted."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from refusion_lit.decoding import Decoder, DecodingOutput, Generation, cut_at_stop, decode
from refusion_lit.evaluation.options import DecodingOptions
from refusion_lit.evaluation.predictions import PredictionsFile, prediction
from refusion_lit.metrics import DecodingMetrics
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.tasks.base import Task
from refusion_lit.types import PromptBatch, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers batches of prompts with a model that may be in training.

    Attributes:
        model: The model.
        detokenize: Turns tokens into text without special tokens.
        sampling: How much to generate and how tokens are drawn.
        options: How decoders are run.
    """

    model: Backbone
    detokenize: Callable[[list[int]], str]
    sampling: SamplingParams
    options: DecodingOptions

    def decode(self, decoder: Decoder, batch: PromptBatch) -> DecodingOutput:
        """Decode a batch; the model is in evaluation mode meanwhile."""
        training = self.model.training
        self.model.eval()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".* does not fit this model")  # said once, at the start
                return decode(
                    self.model,
                    decoder,
                    batch.prompts,
                    self.sampling,
                    max_batch_size=self.options.max_batch_size,
                    max_tokens_per_forward=self.options.max_tokens_per_forward,
                    detokenize=self.detokenize,
                    allow_mismatch=self.options.allow_mismatch,
                )
        finally:
            self.model.train(training)

    def text(self, row: Generation) -> str:
        """Return a response's text, cut before the first stop string."""
        return cut_at_stop(self.detokenize(row.token_ids), self.sampling.stop)


class DecoderRun:
    """One decoder's part of a test or prediction.

    Args:
        answerer: Answers prompts.
        decoder: The decoder.
        task: Scores responses.
        file: Takes the predictions, and knows those that an interrupted run has made.
        metrics: Counts, going on from where the interrupted run was; ``None`` in a prediction.
    """

    def __init__(
        self,
        answerer: Answerer,
        decoder: Decoder,
        task: Task,
        file: PredictionsFile,
        metrics: DecodingMetrics | None = None,
    ) -> None:
        self.file, self.metrics = file, metrics
        self._answerer, self._decoder, self._task = answerer, decoder, task
        if metrics is not None:
            metrics.restore(file.state or {})

    def step(self, batch: PromptBatch) -> list[dict[str, Any]]:
        """Answer a batch's prompts that are not done yet, write their predictions and return them."""
        batch = _without(batch, self.file.done)
        if not batch.prompts:
            return []
        output = self._answerer.decode(self._decoder, batch)
        lines = self._predictions(batch, output)
        if self.metrics is None:
            self.file.write(lines)
        else:
            self.metrics.update(output, [line["score"] or 0.0 for line in lines])
            self.file.write(lines, self.metrics.snapshot())
        return lines

    def _predictions(self, batch: PromptBatch, output: DecodingOutput) -> list[dict[str, Any]]:
        lines = []
        for example, row in zip(batch.examples, output.rows, strict=True):
            text = self._answerer.text(row)
            lines.append(
                prediction(
                    row,
                    prompt=example.query,
                    response=text,
                    reference=example.response,
                    score=self._task.score(example, text),
                    record_forwards=self._answerer.options.record_forwards,
                )
            )
        return lines


class Evaluation:
    """A test or prediction of one or several decoders, which goes on where an interrupted one was.

    Args:
        answerer: Answers prompts.
        decoders: The decoders by name.
        task: Scores responses.
        directory: The run's directory.
        file_name: Name of a decoder's predictions file, without ending, with ``{}`` for the decoder's name.
        checkpoint: What the weights came from; like sampling and decoder, it cannot change where a run goes on.
        counted_on: Count figures with states on this device; ``None`` for no figures.
        rank: This process's number.
        num_ranks: Number of processes.
        resume: Go on behind the predictions that are there.

    Raises:
        ValueError: If there is nothing to resume, or something else than asked for.
    """

    def __init__(
        self,
        answerer: Answerer,
        decoders: Mapping[str, Decoder],
        task: Task,
        directory: Path,
        *,
        file_name: str,
        checkpoint: str,
        counted_on: torch.device | None,
        rank: int,
        num_ranks: int,
        resume: bool,
    ) -> None:
        self.directory = directory
        self._runs: dict[str, DecoderRun] = {}
        shared = {
            "checkpoint": checkpoint,
            "sampling": asdict(answerer.sampling),
            "record_forwards": answerer.options.record_forwards,
        }
        for name, decoder in decoders.items():
            settings = {**shared, "decoder": described(decoder)}
            file = PredictionsFile(
                directory, file_name.format(name), settings, rank=rank, num_ranks=num_ranks, resume=resume
            )
            metrics = None if counted_on is None else DecodingMetrics().to(counted_on)
            self._runs[name] = DecoderRun(answerer, decoder, task, file, metrics)

    def step(self, batch: PromptBatch) -> list[dict[str, Any]]:
        """Answer a batch of prompts with every decoder; return the new predictions."""
        return [line for run in self._runs.values() for line in run.step(batch)]

    def figures(self) -> dict[str, dict[str, float]]:
        """Return each decoder's figures over all processes, which must call this together."""
        return {name: run.metrics.compute() for name, run in self._runs.items() if run.metrics is not None}

    def merge(self, strategy: Strategy) -> None:
        """Close the files and join the shares of all processes, which must call this together."""
        for run in self._runs.values():
            run.file.close()
        strategy.barrier("predictions")
        if strategy.is_global_zero:
            for run in self._runs.values():
                run.file.merge()

    def clear(self) -> None:
        """Delete the record of progress, when everything is written."""
        for run in self._runs.values():
            run.file.clear()


def described(decoder: Decoder) -> Mapping[str, Any]:
    """Return a decoder's class and options."""
    return {"class": type(decoder).__name__, **asdict(decoder)}  # type: ignore[call-overload] - a dataclass


def check_decoder_name(name: str) -> None:
    """Refuse a name that cannot be part of an option's, a metric's and a file's name.

    Raises:
        ValueError: If it holds anything but letters, digits, ``_`` and ``-``.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"decoders: expected names of letters, digits, _ and -, got {name!r}; rename it.")


def _without(batch: PromptBatch, done: Set[str]) -> PromptBatch:
    """Return a batch without the prompts that are done."""
    kept = [i for i, prompt in enumerate(batch.prompts) if prompt.id not in done]
    return PromptBatch(prompts=[batch.prompts[i] for i in kept], examples=[batch.examples[i] for i in kept])
