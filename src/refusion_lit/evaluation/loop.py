"""The loop of test and prediction: decode a batch, score it, write it, count it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from refusion_lit.api import TextModel
from refusion_lit.decoding import Decoder, DecodingOutput, GenerationCallback
from refusion_lit.evaluation.fingerprints import described, predictions_fingerprint
from refusion_lit.evaluation.options import DecodingOptions
from refusion_lit.evaluation.predictions import PredictionsFile, prediction
from refusion_lit.metrics import DecodingMetrics
from refusion_lit.tasks.base import Task, score_of
from refusion_lit.types import Prompt, PromptBatch, SamplingParams
from refusion_lit.utils.fingerprint import Fingerprint
from refusion_lit.utils.require import require

Watch = Callable[[str, int, int], Sequence[GenerationCallback]]


@dataclass(frozen=True, kw_only=True)
class DecodingSetup:
    """What all decoders of a test or prediction share.

    Attributes:
        model: The model.
        sampling: How much to generate and how tokens are drawn.
        options: How decoders are run.
    """

    model: TextModel
    sampling: SamplingParams
    options: DecodingOptions

    def decode(
        self, decoder: Decoder, prompts: list[Prompt], callbacks: Sequence[GenerationCallback] = ()
    ) -> DecodingOutput:
        """Decode prompts; a mismatch was reported at the start."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* does not fit this model")
            return self.model.decode(
                prompts,
                decoder,
                self.sampling,
                batch_size=self.options.max_batch_size,
                max_tokens_per_forward=self.options.max_tokens_per_forward,
                max_cache_tokens=self.options.max_cache_tokens,
                share_prefixes=self.options.share_prefixes,
                callbacks=callbacks,
                allow_mismatch=self.options.allow_mismatch,
            )

    def fingerprint(self, decoder: Decoder, prompts: Iterable[tuple[str, object]]) -> Fingerprint:
        """Return what a decoder's predictions of prompts, given with their ids, depend on."""
        record_forwards = self.options.record_forwards
        return predictions_fingerprint(self.model, decoder, self.sampling, prompts, record_forwards=record_forwards)


class DecoderRun:
    """One decoder's part of a test or prediction.

    Args:
        setup: Decodes prompts.
        decoder: The decoder.
        task: Scores responses.
        file: Takes the predictions, and knows those of an interrupted run.
        metrics: Counts, restored to what the interrupted run had counted; ``None`` in a prediction.
    """

    def __init__(
        self,
        setup: DecodingSetup,
        decoder: Decoder,
        task: Task,
        file: PredictionsFile,
        metrics: DecodingMetrics | None = None,
    ) -> None:
        self.file, self.metrics = file, metrics
        self._setup, self._decoder, self._task = setup, decoder, task
        if metrics is not None:
            metrics.restore(file.state or {})

    def step(self, batch: PromptBatch, callbacks: Sequence[GenerationCallback] = ()) -> list[dict[str, Any]]:
        """Decode a batch's prompts that are not done yet; write their predictions and return them."""
        pairs = zip(batch.prompts, batch.examples, strict=True)
        missing = [(prompt, example) for prompt, example in pairs if prompt.id not in self.file.done]
        if not missing:
            return []
        output = self._setup.decode(self._decoder, [prompt for prompt, _ in missing], callbacks)
        lines = [
            prediction(
                row,
                prompt=example.query,
                reference=example.response,
                score=score_of(self._task, example, row.text),
                record_forwards=self._setup.options.record_forwards,
            )
            for (_, example), row in zip(missing, output.rows, strict=True)
        ]
        if self.metrics is None:
            self.file.write(lines)
        else:
            self.metrics.update(output, [line["score"] or 0.0 for line in lines])
            self.file.write(lines, self.metrics.snapshot())
        return lines


class Evaluation:
    """A test or prediction of one or several decoders, which can resume an interrupted one.

    Args:
        setup: Decodes prompts.
        decoders: The decoders by name.
        task: Scores responses.
        prompts: Id and content of each prompt of the test set.
        directory: The run's directory.
        file_name: Name of a decoder's predictions file, with ``{}`` for the decoder's name.
        counted_on: Device of the figures' states; ``None``: no figures.
        rank: This process's number.
        num_ranks: Number of processes.
        resume: Keep the predictions that are there.
        watch: Shows the progress of a decoder: gets its name, the number of prompts and how many an interrupted run has
            left, and returns callbacks for one call.

    Raises:
        ValueError: If there is nothing to resume, or something else, or two prompts have one id.
    """

    def __init__(
        self,
        setup: DecodingSetup,
        decoders: Mapping[str, Decoder],
        task: Task,
        prompts: Mapping[str, object],
        directory: Path,
        *,
        file_name: str,
        counted_on: torch.device | None,
        rank: int,
        num_ranks: int,
        resume: bool,
        watch: Watch | None = None,
    ) -> None:
        self.directory = directory
        self.fingerprints = {
            name: {**setup.fingerprint(decoder, prompts.items()), "task": _settings(task)}
            for name, decoder in decoders.items()
        }
        self._runs: dict[str, DecoderRun] = {}
        for name, decoder in decoders.items():
            path, share = directory / file_name.format(name), {"rank": rank, "num_ranks": num_ranks}
            file = PredictionsFile(path, self.fingerprints[name], **share, resume=resume, overwrite=True)
            metrics = None if counted_on is None else DecodingMetrics().to(counted_on)
            self._runs[name] = DecoderRun(setup, decoder, task, file, metrics)
        self._watch, self._num_prompts = watch, len(prompts) // num_ranks
        self._num_resumed = {name: len(run.file.done) for name, run in self._runs.items()}

    def step(self, batch: PromptBatch) -> list[dict[str, Any]]:
        """Decode a batch of prompts with every decoder; return the new predictions."""
        lines = []
        try:
            for name, run in self._runs.items():
                callbacks = self._watch(name, self._num_prompts, self._num_resumed[name]) if self._watch else ()
                lines += run.step(batch, callbacks)
        except BaseException:
            for run in self._runs.values():
                with suppress(OSError):  # of a full disk, whose error is on its way already
                    run.file.close()
            raise
        return lines

    def figures(self) -> dict[str, dict[str, float]]:
        """Return each decoder's figures over all processes, which must call this together."""
        return {name: run.metrics.compute() for name, run in self._runs.items() if run.metrics is not None}

    def merge(self, strategy: Strategy) -> None:
        """Close the files and join the shares of all processes, which must call this together."""
        for run in self._runs.values():
            run.file.close()
        strategy.barrier("predictions written")
        if strategy.is_global_zero:
            for run in self._runs.values():
                run.file.merge()
        strategy.barrier("predictions merged")

    def complete(self) -> None:
        """Record that all predictions are complete."""
        for run in self._runs.values():
            run.file.complete()


def _settings(task: Task) -> dict[str, Any]:
    """Return a task's class and those of its options that are numbers; its examples are fingerprinted themselves."""
    return {name: value for name, value in described(task).items() if name == "class" or isinstance(value, int | float)}


def check_decoder_name(name: str) -> None:
    """Refuse a name that cannot be part of an option's, a metric's and a file's name.

    Raises:
        ValueError: If it holds anything but letters, digits, ``_`` and ``-``.
    """
    fits = re.fullmatch(r"[\w-]+", name) is not None
    require(fits, "decoders", "names of letters, digits, _ and -", name, "rename it")
