"""The test and prediction loop: decodes batches with every decoder, scores and counts responses, writes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch.distributed
from torch.distributed.fsdp import FSDPModule

from refusion_lit.checkpoints.models import load, pair
from refusion_lit.data.evaluation import PromptBatch
from refusion_lit.decoding import CallShapes, Decoder, DecodingOutput, GenerationCallback, check_prompts
from refusion_lit.evaluation.latency import Entrant, choose_baseline, measure_latency, summarize
from refusion_lit.evaluation.predictions import (
    PredictionsFile,
    class_and_options,
    prediction,
    predictions_fingerprint,
)
from refusion_lit.metrics import DecodingMetrics
from refusion_lit.modeling.fsdp import gather
from refusion_lit.modeling.load import ModelPlan
from refusion_lit.reports.results import (
    RESULTS,
    environment,
    ran_concurrently,
    read_results,
)
from refusion_lit.reports.write import report_results
from refusion_lit.tasks.base import Task, score_response
from refusion_lit.text_model import TextModel, check_plan
from refusion_lit.types import DecodingOptions, LatencyOptions, Prompt, SamplingParams
from refusion_lit.utils.errors import NothingToDoError, error_reason
from refusion_lit.utils.files import Fingerprint, meta_path, write_json_atomically
from refusion_lit.utils.require import OptionError, require

_T = TypeVar("_T")
_CALL_SHAPES = "call_shapes"


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(DecodingOptions):
    """Options for running decoders in evaluation.

    Attributes:
        verifier: Path or hub id of an autoregressive model with the same tokenizer, for the decoder ``APD``.
        latency: Measure speeds after the test, all decoders in turns on the same prompts; ``None``: do not measure.
    """

    batch_size: int = 64
    verifier: str | None = None
    latency: LatencyOptions | None = None


@dataclass(kw_only=True)
class _DecoderState:
    """A decoder's progress in a test or prediction.

    Attributes:
        decoder: The decoder.
        fingerprint: Fingerprint of everything that its predictions depend on.
        file: The predictions file of the first process; ``None`` in other processes.
        done: Ids that an interrupted run has decoded.
        metrics: Counts in a test, which the first process keeps; ``None`` in ``predict``.
        call_shapes: The model's calls in a test.
        is_warm: Whether the decoder has decoded a prompt that is not timed.
    """

    decoder: Decoder
    fingerprint: Fingerprint
    file: PredictionsFile | None = None
    done: set[str] = field(default_factory=set)
    metrics: DecodingMetrics | None = None
    call_shapes: CallShapes = field(default_factory=CallShapes)
    is_warm: bool = False

    def restore(self, file: PredictionsFile) -> None:
        """Write to a file from now on, and continue from the predictions and counts in it.

        Raises:
            ValueError: If the counts of an interrupted test are damaged.
        """
        self.file = file
        if self.metrics is None:
            return
        try:
            counts = dict(file.state or {})
            self.call_shapes = CallShapes.from_lines(counts.pop(_CALL_SHAPES) if counts else [])
            self.metrics.restore(counts)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
            file.close()
            raise OptionError(
                f"resume: expected the counts of an interrupted test in {meta_path(file.path)}, got damaged counts "
                f"({error_reason(error)}); start again without resume.",
                "resume",
            ) from error


class Evaluation(L.Callback):
    """A test or prediction with any number of decoders, which can resume an interrupted run.

    Processes share the prompts; the first process writes all predictions. As a callback it starts and ends with
    Lightning's test or prediction, and closes the predictions files if an error or Ctrl-C ends the trainer's work.

    Args:
        decoders: Decoders by name; ``None`` drops a name. If empty, the model's default decoder is used.
        sampling: How much to generate and how tokens are drawn.
        options: How decoders are run.
        seed: The run's seed, recorded if the run has no environment.
        resume: Keep an interrupted run's predictions.

    Attributes:
        named_decoders: Decoders by name, without dropped names.
        sampling: How much to generate and how tokens are drawn.
        options: How decoders are run.
        results: The last test's figures by decoder name.
        mismatches: Reasons why a tested decoder does not fit the model, by decoder name.
        environment: The run's environment, for ``results.json``; by default the environment of this process.
        config: The run's resolved config with long texts cut, for ``results.json``; ``None`` if there is none.

    Raises:
        ValueError: If a decoder's name cannot be part of a file's name, or an option does not fit a decoder.
    """

    _trainer: L.Trainer
    _model: TextModel
    _task: Task
    _directory: Path
    _batch_size: int
    _num_prompts: int
    _prompts: Sequence[Prompt]
    _has_warned: bool

    def __init__(
        self,
        decoders: Mapping[str, Decoder | None],
        sampling: SamplingParams,
        options: EvaluationOptions,
        *,
        seed: int = 0,
        resume: bool = False,
    ) -> None:
        is_mapping, fix = isinstance(decoders, Mapping), 'pass {"refusion": ReFusion()}, for example'
        require(is_mapping, "model.decoders", "decoders by name", decoders, fix)
        named = {name: decoder for name, decoder in decoders.items() if decoder is not None}
        require(bool(named) or not decoders, "model.decoders", "at least one decoder", decoders, "add one")
        for name, decoder in named.items():
            is_decoder = isinstance(decoder, Decoder)
            require(is_decoder, f"model.decoders.{name}", "an instance of a decoder class", decoder, "create one")
            fits = re.fullmatch(r"[\w-]+", name) is not None  # part of an option's, a metric's and a file's name
            require(fits, "decoders", "names of letters, digits, _ and -", name, "rename it")
            decoder.check(sampling)
        option = "model.decoding.verifier"
        users = [name for name, decoder in named.items() if "verifier" in decoder.requirements().predictions]
        fix = "name an autoregressive model with the same tokenizer"
        require(options.verifier is not None or not users, option, f"a second model for {', '.join(users)}", None, fix)
        got = ", ".join(named) or "the model's own"
        fix = "add APD to model.decoders, or leave it out"
        require(
            options.verifier is None or bool(users), option, "a decoder that uses a verifier, as APD does", got, fix
        )
        self.named_decoders = named
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
        """Return the decoders by name; without names, the model's default decoder."""
        if self.named_decoders:
            return self.named_decoders
        decoder = model.default_decoder.adapt_to(self.sampling)
        return {type(decoder).__name__.lower(): decoder}

    def check_plan(self, plan: ModelPlan, prompts: Sequence[Prompt], *, is_test: bool) -> None:
        """Before weights are read, refuse decoders that do not fit a model, and prompts that are too long.

        Args:
            plan: The model's tokenizer, traits and length limits.
            prompts: The prompts to decode.
            is_test: Whether all decoders decode; otherwise only the first decoder does.

        Raises:
            ValueError: Naming the decoder or the longest prompt.
        """
        lengths = [(len(prompt.token_ids) + prompt.num_uncounted, prompt.id) for prompt in prompts]
        decoders = [*self.named_decoders.values()] or [None]
        for decoder in decoders if is_test else decoders[:1]:
            check_plan(plan, decoder, lengths, self.sampling, allow_mismatch=self.options.allow_mismatch)

    def decode(
        self,
        model: TextModel,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        callbacks: Sequence[GenerationCallback] = (),
        sampling: SamplingParams | None = None,
        *,
        trace: bool = False,
        checked: bool = False,
    ) -> DecodingOutput:
        """Decode prompts with the evaluation's options; ``sampling`` replaces its sampling options."""
        options = {name: getattr(self.options, name) for name in DecodingOptions.__dataclass_fields__}
        options |= {"callbacks": callbacks, "trace": trace, "checked": checked}
        return model.decode(prompts, decoder, sampling or self.sampling, **options)

    def on_test_start(self, trainer: L.Trainer, pl_module: Any) -> None:  # noqa: ANN401 - training's, above this layer
        """Check decoders and prompts before any work, and open the predictions files.

        A test runs all decoders and counts their figures. A prediction runs the first decoder alone.

        Args:
            trainer: The trainer, with an :class:`~refusion_lit.data.module.InstructionDataModule`.
            pl_module: The module, which gives the model.

        Raises:
            ValueError: If a decoder does not fit the model, a prompt is too long, or the run cannot be resumed.
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
        self._directory = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir waits for all processes
        decoders = dict(list(self.decoders(model).items())[: None if trainer.testing else 1])
        self.mismatches = {
            name: model.check_decoder(decoder, allow_mismatch=self.options.allow_mismatch)
            for name, decoder in decoders.items()
        }
        if isinstance(model.backbone, FSDPModule):
            gather(model.backbone)
        batch = PromptBatch(data.test_prompts())
        for decoder in decoders.values():
            check_prompts(
                model.model_for(decoder), decoder, batch.prompts, self.sampling, self.options.max_cache_tokens
            )
        self._prompts = batch.prompts
        fits = self.options.latency is None or trainer.world_size == 1
        fix = "test in one process, or leave latency out"
        require(fits, "model.decoding.latency", "one process", trainer.world_size, fix)
        self._num_prompts = len(batch.prompts) // trainer.world_size
        contents = {}
        for prompt, example in zip(batch.prompts, batch.examples, strict=True):
            contents[prompt.id] = (list(prompt.token_ids), example.response, *filter(None, [prompt.given]))
        self._running, self._has_warned = {}, False
        for name, decoder in decoders.items():
            path = self._directory / (f"predictions_{name}.jsonl" if trainer.testing else "predictions.jsonl")
            self._running[name] = self._start(path, decoder, contents)
        reported: set[str] = set()
        with suppress(ValueError):  # a missing or damaged file is written again
            reported = {*(read_results(self._directory / RESULTS) or {"results": {}})["results"]}
        is_reported = trainer.strategy.broadcast(not trainer.testing or decoders.keys() <= reported)
        if is_reported and all(len(state.done) == len(contents) for state in self._running.values()):
            raise NothingToDoError(f"the predictions in {self._directory} are complete; there is nothing left to do")

    on_predict_start = on_test_start

    def _start(self, path: Path, decoder: Decoder, contents: Mapping[str, object]) -> _DecoderState:
        """Open a decoder's predictions file in the first process, and continue from the predictions in it."""
        fingerprint = predictions_fingerprint(self._model, decoder, self.sampling, contents.items())
        # The fingerprint contains the examples. Among the task's other options, only numbers can matter.
        options = class_and_options(self._task)
        settings = {name: v for name, v in options.items() if name == "class" or isinstance(v, int | float)}
        fingerprint = {**fingerprint, "task": {**settings, "metrics": list(self._task.metrics)}}
        file = error = None
        state = _DecoderState(decoder=decoder, fingerprint=fingerprint)
        if self._trainer.testing:
            state.metrics = DecodingMetrics(metrics=self._task.metrics).to(self._model.backbone.device)
        if self._trainer.is_global_zero:
            try:
                file = PredictionsFile(path, fingerprint, resume=self._resume)
                state.restore(file)
            except ValueError as refusal:
                error = refusal
        done, error = self._trainer.strategy.broadcast((file.done if file else set(), error))
        if error:
            raise error  # in every process, as none may wait for another
        state.done = set(done)
        if state.metrics is not None and file is None:
            state.metrics.restore({})
        return state

    def step(self, batch: PromptBatch) -> list[dict[str, Any]]:
        """Decode a batch's remaining prompts with every decoder; return the new predictions."""
        predictions = []
        watch = getattr(self._trainer.progress_bar_callback, "watch", None)
        for name, state in self._running.items():
            pairs = zip(batch.prompts, batch.examples, strict=True)
            missing = [(prompt, example) for prompt, example in pairs if prompt.id not in state.done]
            output, lines = DecodingOutput(), []
            if missing:
                if state.metrics is not None and not state.is_warm:
                    # The first calls of kernels take longer.
                    self.decode(self._model, state.decoder, [missing[0][0]], checked=True)
                    state.is_warm = True
                callbacks = watch(name, self._num_prompts, len(state.done)) if watch else []
                prompts = [prompt for prompt, _ in missing]
                output = self.decode(self._model, state.decoder, prompts, callbacks, checked=True)
            for (_, example), row in zip(missing, output.rows, strict=True):
                score, metrics = score_response(self._task, example, row.text)
                about = {"prompt": example.query, "reference": example.response, "score": score, "metrics": metrics}
                lines.append(prediction(row, decoder=type(state.decoder).__name__, **about))
            for produced in self._gather((output, lines)):
                self._write(state, *produced)
            predictions += lines
        return predictions

    def _gather(self, value: _T) -> list[_T]:
        """Return all processes' values in the first process, nothing in the others."""
        if self._trainer.world_size == 1:
            return [value]
        values: list[Any] = [None] * self._trainer.world_size
        torch.distributed.all_gather_object(values, value)
        return values if self._trainer.is_global_zero else []

    def _write(self, state: _DecoderState, output: DecodingOutput, lines: list[dict[str, Any]]) -> None:
        """Count and write a batch's predictions."""
        if not lines:
            return
        assert state.file is not None
        snapshot = None
        if state.metrics is not None:
            if not self._has_warned and any(line["score"] is None for line in lines):
                self._has_warned = True
                name = type(self._task).__name__
                sys.stderr.write(f"{name}: scores are missing (0 in tables) until `refusion-lit score` computes them\n")
            scores = [line["score"] or 0.0 for line in lines]
            state.metrics.update(output, scores, [line.get("metrics", {}) for line in lines])
            snapshot = state.metrics.snapshot()
            state.call_shapes.merge(output.call_shapes)
            snapshot[_CALL_SHAPES] = state.call_shapes.lines()
        state.file.write(lines, snapshot)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Close the predictions files."""
        for state in self._running.values():
            with suppress(OSError):  # a full disk has already raised its error
                if state.file:
                    state.file.close()

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the predictions files; print, write and log a test's figures."""
        self.results = {
            name: state.metrics.compute() for name, state in self._running.items() if state.metrics is not None
        }
        for state in self._running.values():
            if state.file:
                state.file.close()
        if trainer.is_global_zero and self.results:
            self._report()
        trainer.strategy.barrier("results written")
        # All processes have the same figures. Without sync_dist, Lightning would warn; the maximum keeps every digit.
        for name, figures in self.results.items():
            values = {f"test/{name}/{figure}": float(value) for figure, value in figures.items()}
            pl_module.log_dict(values, sync_dist=True, reduce_fx="max")

    on_predict_end = on_test_epoch_end

    def _report(self) -> None:
        """Write ``results.json`` and the report, and print the decoders' table."""
        results = {
            "sampling": asdict(self.sampling),
            **asdict(self.options),
            "batch_size": self._batch_size,
            "decoders": {name: class_and_options(state.decoder) for name, state in self._running.items()},
            "fingerprints": {name: state.fingerprint for name, state in self._running.items()},
            "results": self.results,
            _CALL_SHAPES: {name: state.call_shapes.lines() for name, state in self._running.items()},
            "metrics": list(self._task.metrics),
            "tested": self._task.describe_test_split(),
            "mismatches": self.mismatches,
            "environment": self.environment or environment(self._seed),
            "config": self.config,
        }
        if self.options.latency is not None and not ran_concurrently(results):
            results["latency_results"] = self._measure_latency(self.options.latency)
        write_json_atomically(self._directory / RESULTS, results)
        num_prompts = max(int(figures["num_prompts"]) for figures in self.results.values())
        report_results(self._directory / RESULTS, f"{num_prompts} prompts, batch size {self._batch_size}")

    def _measure_latency(self, options: LatencyOptions) -> dict[str, Any]:
        """Measure all decoders in turns on prompts of the test."""
        entrants = {
            name: Entrant(model=self._model, decoder=state.decoder, sampling=self.sampling, prompts=self._prompts)
            for name, state in self._running.items()
            if not self.mismatches[name]
        }
        if not entrants:
            return {}
        timings = measure_latency(entrants, options, seed=self._seed)
        return summarize(timings, choose_baseline(entrants))
