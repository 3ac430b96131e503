"""The loop of test and prediction: decode a batch with every decoder, score it, count it, write it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
from torch.distributed.fsdp import FSDPModule

from refusion_lit.checkpoints.models import load, pair
from refusion_lit.data.evaluation import PromptBatch
from refusion_lit.decoding import Decoder, DecodingOutput, GenerationCallback, check_prompts
from refusion_lit.evaluation.predictions import (
    PredictionsFile,
    described,
    prediction,
    predictions_fingerprint,
    score_of,
)
from refusion_lit.metrics import DecodingMetrics
from refusion_lit.modeling.fsdp import gather
from refusion_lit.reports.results import RESULTS, environment, with_class
from refusion_lit.reports.tables import decoder_table
from refusion_lit.reports.write import report_results
from refusion_lit.tasks.base import Task
from refusion_lit.text_model import TextModel
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from refusion_lit.utils.errors import NothingToDoError
from refusion_lit.utils.files import Fingerprint, read_object, write_json_atomically
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(DecodingOptions):
    """How decoders are run while a model is evaluated.

    Attributes:
        verifier: Path or hub id of an autoregressive model with the same tokenizer, for the decoder ``APD``.
    """

    batch_size: int = 64
    verifier: str | None = None


@dataclass(kw_only=True)
class _DecoderState:
    """One decoder of a test or prediction that is running.

    Attributes:
        decoder: The decoder.
        fingerprint: What its predictions depend on.
        file: Takes the predictions, and knows those of an interrupted run.
        metrics: Counts, those of the interrupted run included; ``None`` in a prediction.
        is_warm: Whether it has decoded a prompt whose time does not count.
    """

    decoder: Decoder
    fingerprint: Fingerprint
    file: PredictionsFile
    metrics: DecodingMetrics | None = None
    is_warm: bool = False


class Evaluation(L.Callback):
    """A test or prediction with one or several decoders, which can resume an interrupted one.

    Processes share the prompts; each decodes its part. As a callback it begins and ends with Lightning's test or
    prediction, and gives the predictions files free if an error or Ctrl-C ends the trainer's work.

    Args:
        decoders: Decoders by name; empty: the model's own one. ``None`` drops a name.
        sampling: How much to generate and how tokens are drawn.
        options: How decoders are run.
        seed: The run's seed, recorded if the run has no environment.
        resume: Keep the predictions of an interrupted run.

    Attributes:
        named: The given decoders by name; empty: the model's own one.
        sampling: As given.
        options: As given.
        results: Figures of the last test by decoder name.
        mismatches: Reasons why a tested decoder does not fit the model, by decoder name.
        environment: The run's environment, for ``results.json``; by default that of this process.
        config: The run's resolved config with long texts cut, for ``results.json``; ``None`` if there is none.

    Raises:
        ValueError: If a decoder's name cannot be that of a file, or an option does not fit a decoder.
    """

    _trainer: L.Trainer
    _model: TextModel
    _task: Task
    _directory: Path
    _decoders: dict[str, Decoder]
    _before: dict[str, Any]
    _batch_size: int
    _num_prompts: int
    _has_told: bool

    def __init__(
        self,
        decoders: Mapping[str, Decoder | None],
        sampling: SamplingParams,
        options: EvaluationOptions,
        *,
        seed: int = 0,
        resume: bool = False,
    ) -> None:
        self.named = {name: decoder for name, decoder in decoders.items() if decoder is not None}
        require(bool(self.named) or not decoders, "model.decoders", "at least one decoder", decoders, "add one")
        for name, decoder in self.named.items():
            fits = re.fullmatch(r"[\w-]+", name) is not None  # part of an option's, a metric's and a file's name
            require(fits, "decoders", "names of letters, digits, _ and -", name, "rename it")
            decoder.check(sampling)
        option = "model.decoding.verifier"
        users = [name for name, each in self.named.items() if "verifier" in each.requirements().predictions]
        fix = "name an autoregressive model with the same tokenizer"
        require(options.verifier is not None or not users, option, f"a second model for {', '.join(users)}", None, fix)
        got = ", ".join(self.named) or "the model's own"
        fix = "add APD to model.decoders, or leave it out"
        require(options.verifier is None or bool(users), option, "a decoder that uses it, as APD does", got, fix)
        self.sampling = sampling
        self.options = options
        self.results: dict[str, dict[str, float]] = {}
        self.mismatches: dict[str, list[str]] = {}
        self.environment: dict[str, Any] | None = None
        self.config: dict[str, Any] | None = None
        self._seed = seed
        self._resume = resume
        self._running: dict[str, _DecoderState] = {}

    def decoders(self, model: TextModel) -> dict[str, Decoder]:
        """Return the decoders by name; the model's own one where none is named."""
        if self.named:
            return self.named
        decoder = model.default_decoder.fitted(self.sampling)
        return {type(decoder).__name__.lower(): decoder}

    def decode(
        self,
        model: TextModel,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        callbacks: Sequence[GenerationCallback] = (),
        sampling: SamplingParams | None = None,
        *,
        trace: bool = False,
    ) -> DecodingOutput:
        """Decode prompts with the options of the evaluation; ``sampling`` replaces its own."""
        options = {name: getattr(self.options, name) for name in DecodingOptions.__dataclass_fields__}
        return model.decode(prompts, decoder, sampling or self.sampling, callbacks=callbacks, trace=trace, **options)

    def on_test_start(self, trainer: L.Trainer, pl_module: Any) -> None:  # noqa: ANN401 - training's, above this layer
        """Check decoders and prompts before any work, and open the predictions files.

        A test runs all decoders and counts their figures; a prediction runs the first one alone.

        Args:
            trainer: The trainer, with an :class:`~refusion_lit.data.module.InstructionDataModule`.
            pl_module: The module, which gives the model.

        Raises:
            ValueError: If a decoder does not fit the model, a prompt is too long, or there is nothing to resume, or
                something else.
        """
        data: Any = getattr(trainer, "datamodule", None)
        require(data is not None, "datamodule", "a data module, which names the task", None, "pass one to the trainer")
        self._trainer = trainer
        model: TextModel = pl_module.text_model()
        self._model = model
        if self.options.verifier is not None:
            pair(model, load(self.options.verifier, device=model.backbone.device))
        self._task = data.task
        # The loader's batches limit the number of prompts that are decoded concurrently.
        self._batch_size = min(self.options.batch_size, data.eval_batch_size)
        self._directory = Path(trainer.log_dir or trainer.default_root_dir)  # on every process: it waits for all
        decoders = dict(list(self.decoders(model).items())[: None if trainer.testing else 1])
        allowed = self.options.allow_mismatch
        self.mismatches = {name: model.check_decoder(each, allow_mismatch=allowed) for name, each in decoders.items()}
        if isinstance(model.backbone, FSDPModule):
            gather(model.backbone)
        batch = PromptBatch(data.test_prompts())
        for decoder in decoders.values():
            check_prompts(
                model.model_for(decoder), decoder, batch.prompts, self.sampling, self.options.max_cache_tokens
            )
        self._num_prompts = len(batch.prompts) // trainer.world_size
        contents = {}
        for prompt, example in zip(batch.prompts, batch.examples, strict=True):
            contents[prompt.id] = (list(prompt.token_ids), example.response, *filter(None, [prompt.given]))
        self._decoders, self._running, self._before, self._has_told = decoders, {}, {}, False
        complete: dict[str, NothingToDoError] = {}
        for name, decoder in decoders.items():
            path = self._directory / (f"predictions_{name}.jsonl" if trainer.testing else "predictions.jsonl")
            try:
                self._running[name] = self._opened(path, decoder, contents)
            except NothingToDoError as error:
                complete[name] = error
        if not self._running:
            raise next(iter(complete.values()))
        if complete:  # their figures stay
            self._before = read_object(self._directory / RESULTS)
            has_all = complete.keys() <= (self._before.get("results") or {}).keys()
            expected = f"{RESULTS} with the figures of {', '.join(complete)}, which is complete"
            require(has_all, "resume", expected, "one without", "restore it, or start again without resume")

    on_predict_start = on_test_start

    def _opened(self, path: Path, decoder: Decoder, contents: Mapping[str, object]) -> _DecoderState:
        """Open a decoder's predictions file, with what an interrupted run has left in it."""
        fingerprint = predictions_fingerprint(self._model, decoder, self.sampling, contents.items())
        # The examples are fingerprinted themselves: of the task's other options only numbers can matter.
        settings = {n: v for n, v in described(self._task).items() if n == "class" or isinstance(v, int | float)}
        fingerprint = {**fingerprint, "task": {**settings, "metrics": list(self._task.metrics)}}
        rank = self._trainer.global_rank
        file = PredictionsFile(path, fingerprint, rank=rank, num_ranks=self._trainer.world_size, resume=self._resume)
        state = _DecoderState(decoder=decoder, fingerprint=fingerprint, file=file)
        if self._trainer.testing:
            state.metrics = DecodingMetrics(metrics=self._task.metrics).to(self._model.backbone.device)
            state.metrics.restore(file.state or {})
        return state

    def step(self, batch: PromptBatch) -> list[dict[str, Any]]:
        """Decode the prompts of a batch that are not done yet with every decoder; return the new predictions."""
        predictions = []
        watch = getattr(self._trainer.progress_bar_callback, "watch", None)
        for name, state in self._running.items():
            pairs = zip(batch.prompts, batch.examples, strict=True)
            missing = [(prompt, example) for prompt, example in pairs if prompt.id not in state.file.done]
            if not missing:
                continue
            if state.metrics is not None and not state.is_warm:
                self.decode(self._model, state.decoder, [missing[0][0]])  # the first calls of kernels take longer
                state.is_warm = True
            callbacks = [*watch(name, self._num_prompts, len(state.file.done))] if watch else []
            output = self.decode(self._model, state.decoder, [prompt for prompt, _ in missing], callbacks)
            lines = []
            for (_, example), row in zip(missing, output.rows, strict=True):
                score, metrics = score_of(self._task, example, row.text)
                about = {"prompt": example.query, "reference": example.response, "score": score, "metrics": metrics}
                lines.append(prediction(row, decoder=type(state.decoder).__name__, **about))
            if state.metrics is not None:
                self._tell_of_missing_scores(lines)
                scores = [line["score"] or 0.0 for line in lines]
                state.metrics.update(output, scores, [line.get("metrics", {}) for line in lines])
            state.file.write(lines, None if state.metrics is None else state.metrics.snapshot())
            predictions += lines
        return predictions

    def _tell_of_missing_scores(self, lines: list[dict[str, Any]]) -> None:
        """Print, once, that some predictions have no score."""
        if not self._has_told and any(line["score"] is None for line in lines):
            self._has_told = True
            name = type(self._task).__name__
            sys.stderr.write(f"{name}: scores are missing (0 in tables) until `refusion-lit score` computes them.\n")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Close the predictions files."""
        for state in self._running.values():
            with suppress(OSError):  # of a full disk, whose error is on its way already
                state.file.close()

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Join the predictions of all processes; print, write and log the figures of a test."""
        metrics = {name: state.metrics for name, state in self._running.items() if state.metrics is not None}
        self.results = self._of_all("results", {name: each.compute() for name, each in metrics.items()})
        for state in self._running.values():
            state.file.close()
        trainer.strategy.barrier("predictions written")
        if trainer.is_global_zero:
            if self.results:
                self._report()  # before the files count as complete: a kill in between can be resumed
            for state in self._running.values():
                state.file.merge()
        trainer.strategy.barrier("predictions merged")
        for state in self._running.values():
            state.file.complete()
        for name, figures in self.results.items():
            pl_module.log_dict({f"test/{name}/{figure}": float(value) for figure, value in figures.items()})

    on_predict_end = on_test_epoch_end

    def _of_all(self, part: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Add to a part of ``results.json`` what it said before of the decoders that were complete already."""
        values = {**(self._before.get(part) or {}), **own}
        return {name: values[name] for name in self._decoders if name in values}

    def _report(self) -> None:
        """Print the table of the decoders, and write ``results.json`` and the report."""
        shown = {name: with_class(name, type(decoder).__name__) for name, decoder in self._decoders.items()}
        marked = {shown[name] for name, why in self.mismatches.items() if why}
        figures = {shown[name]: each for name, each in self.results.items()}
        decoder_table(figures, self._batch_size, marked=marked, metrics=self._task.metrics)
        results = {
            "sampling": asdict(self.sampling),
            **asdict(self.options),
            "batch_size": self._batch_size,
            "decoders": {name: described(decoder) for name, decoder in self._decoders.items()},
            "fingerprints": self._of_all("fingerprints", {n: state.fingerprint for n, state in self._running.items()}),
            "results": self.results,
            "metrics": list(self._task.metrics),
            "tested": self._task.describe_test_split(),
            "mismatches": self.mismatches,
            "environment": self.environment or environment(self._seed),
            "config": self.config,
        }
        write_json_atomically(self._directory / RESULTS, results)
        report_results(self._directory / RESULTS)
