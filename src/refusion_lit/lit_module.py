"""The LightningModule: training, validation, test and prediction with one backbone, objective and set of decoders."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from refusion_lit.api import TextModel, check_context, cut_at_stop
from refusion_lit.bundle import BUNDLE_KEY, Bundle, check_weights, describe
from refusion_lit.decoding import Decoder, DecodingOutput, ReFusion, decode
from refusion_lit.decoding.engine import check_model
from refusion_lit.metrics import DecodingMetrics, TermMeans
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.modeling.sharding import gather, shard
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.objectives import Hybrid, Objective
from refusion_lit.objectives.cross_entropy import check_kernel
from refusion_lit.objectives.packing import pack
from refusion_lit.objectives.step import StepLoss
from refusion_lit.predictions import PredictionsFile, prediction
from refusion_lit.reports.environment import config_of, environment_of
from refusion_lit.reports.tables import decoder_table
from refusion_lit.reports.write import write_report
from refusion_lit.schedule import warmup_cosine
from refusion_lit.types import CorruptedBatch, LossOutput, PromptBatch, ResponseBatch, SamplingParams

_NUM_STRATA = 16
_NUM_POSITIONS = "refusion_lit_num_positions"


class SlotDiffusionModule(L.LightningModule):
    """Trains a causal slot model and measures decoders on it.

    Args:
        backbone: Where the model comes from.
        tokenizer: The data module's tokenizer; the command line links it.
        objective: What is trained.
        decoders: Named decoders that ``test`` compares; ``predict`` and logged samples use the first.
        sampling: How much to generate and how tokens are drawn.
        optimizer: Makes the optimizer from parameter groups; AdamW by default. Norms and biases get no weight decay.
        lr_scheduler: Makes the schedule from the optimizer; linear warm-up and cosine by default.
        warmup_steps: Steps of warm-up in the default schedule.
        final_lr_ratio: Learning rate at the end of the default schedule over its peak.
        seed: Seeds the initial weights and the training noise, which is a function of seed, epoch and sample alone.
        max_batch_size: Prompts that share a forward in decoding. Changes no token.
        max_tokens_per_forward: Bound on the positions, padding included, that a call computes in decoding; prompts
            that do not fit wait. ``null`` for none. Changes no token.
        allow_mismatch: Run decoders that the model was not trained for; tables mark them.
        record_forwards: Add ``forward_shapes`` to predictions.
        num_logged_samples: Decoded validation samples logged as text after each validation.
        prompt_template: How a query becomes a prompt where the tokenizer has no chat template.
        resume: Let ``test`` and ``predict`` go on behind the predictions of an interrupted run in the same directory.

    Attributes:
        num_positions: Token positions that training has computed on all processes: padding, second views and clean
            copies count as much as any other. A resumed run goes on counting.
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        objective: Objective = Hybrid(),  # noqa: B008 - immutable
        decoders: dict[str, Decoder] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - immutable
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        warmup_steps: int = 100,
        final_lr_ratio: float = 0.02,
        seed: int = 0,
        max_batch_size: int = 64,
        max_tokens_per_forward: int | None = None,
        allow_mismatch: bool = False,
        record_forwards: bool = False,
        num_logged_samples: int = 4,
        prompt_template: str = "{query}",
        resume: bool = False,
    ) -> None:
        super().__init__()
        self.backbone_config = backbone
        self.tokenizer = tokenizer
        self.objective = objective
        self.decoders: dict[str, Decoder] = decoders or {"refusion": ReFusion()}
        self.sampling = sampling
        self.optimizer_callable = optimizer
        self.scheduler_callable = lr_scheduler
        self.warmup_steps = warmup_steps
        self.final_lr_ratio = final_lr_ratio
        self.seed = seed
        self.max_batch_size = max_batch_size
        self.max_tokens_per_forward = max_tokens_per_forward
        self.allow_mismatch = allow_mismatch
        self.record_forwards = record_forwards
        self.num_logged_samples = num_logged_samples
        self.prompt_template = prompt_template
        self.resume = resume
        self.backbone: Backbone | None = None
        self._traits_from_checkpoint = False
        self.validation_means: TermMeans | None = None
        self.test_metrics = nn.ModuleDict()
        self._files: dict[str, PredictionsFile] = {}
        self.num_positions: Tensor = torch.zeros((), dtype=torch.float64)
        self._positions_before, self._since, self._paused = 0.0, 0.0, 0.0
        self._step_loss: StepLoss | None = None
        self.results: dict[str, dict[str, float]] = {}
        for name, decoder in self.decoders.items():
            check_decoder_name(name)
            decoder.check(sampling)

    # --- model -----------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the backbone, once, when the tokenizer is known."""
        if self.backbone is not None:
            return
        if self.tokenizer is None:
            raise ValueError("tokenizer: expected one, got None; pass the data module's built_tokenizer.")
        self.backbone = self.backbone_config.build(self.tokenizer, seed=self.seed)
        if self.device_mesh is not None:  # the strategy shards
            mixed = self.trainer.precision == "bf16-mixed"
            shard(self.backbone, self.device_mesh["data_parallel"], compute_dtype=torch.bfloat16 if mixed else None)

    @property
    def model(self) -> Backbone:
        """The backbone; built by now."""
        assert self.backbone is not None, "configure_model has not been called"
        return self.backbone

    def text_model(self) -> TextModel:
        """Return the model as what the Python interface offers."""
        self.configure_model()
        assert self.tokenizer is not None
        return TextModel(self.model, self.tokenizer, self.prompt_template)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what it takes to generate from the checkpoint alone. Test-time options are not stored."""
        assert self.tokenizer is not None
        checkpoint[BUNDLE_KEY] = describe(self.model, self.tokenizer, self.prompt_template).to_checkpoint()
        checkpoint[_NUM_POSITIONS] = int(self.num_positions)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what the stored weights were trained for; refuse those of another model."""
        if BUNDLE_KEY in checkpoint:
            bundle = Bundle.from_checkpoint(checkpoint, "the checkpoint")
            if self.tokenizer is not None:
                bundle.check_tokenizer(self.tokenizer)
            self.model.traits = bundle.traits
        if "state_dict" in checkpoint and (self._trainer is None or _is_whole(self._trainer.strategy)):
            check_weights(checkpoint["state_dict"], self.state_dict(), "ckpt_path")
        self.num_positions = torch.tensor(checkpoint.get(_NUM_POSITIONS, 0), dtype=torch.float64)

    # --- training --------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Check what training needs, and note what the weights will be trained for."""
        check_kernel(self.objective.kernel, self.device)
        self.model.traits = self.objective.traits
        self.model.train()
        self.num_positions = self.num_positions.to(self.device)
        self._positions_before, self._since, self._step_loss = float(self.num_positions), 0.0, None

    def on_train_batch_start(self, batch: ResponseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Key what a model draws for itself, as dropout does, to the batch: a resumed run draws the same."""
        key = stable_key("batch", self.seed, self.current_epoch, batch_idx, self.global_rank)
        torch.manual_seed(key & (1 << 63) - 1)

    def corrupt(self, batch: ResponseBatch) -> CorruptedBatch:
        """Corrupt a training batch with noise that depends on seed, epoch and samples alone; pack it if asked to."""
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=self.seed, epoch=self.current_epoch)
        corrupted = self.objective.corrupt(batch, noise, self.model.special_tokens)
        if batch.rows is None:
            return corrupted
        return pack(corrupted, batch.rows, pad_token_id=self.model.special_tokens.pad_token_id)

    def loss(self, corrupted: CorruptedBatch) -> LossOutput:
        """Run the backbone and return the loss."""
        hidden = self.model(corrupted.input_ids, corrupted.position_ids, corrupted.attention_mask)
        return self.objective.loss(hidden, self.model.head, corrupted)

    def training_step(self, batch: ResponseBatch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Return a batch's share of its step's loss, and log the step's loss by terms with the last batch."""
        corrupted = self.corrupt(batch)
        step = self._step_loss = self._step_of(batch, corrupted)
        loss = self.loss(corrupted)
        share = step.share(loss)
        if step.num_left == 0 and self._logs_now():
            self._log_step(step, loss)
        # Lightning divides by the number of accumulated batches, and gradients are averaged over processes.
        return share * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def _step_of(self, batch: ResponseBatch, corrupted: CorruptedBatch) -> StepLoss:
        """Return what the optimizer step of a batch adds up to; the step's first batch counts them all."""
        if batch.following is None and self._step_loss is not None and self._step_loss.num_left:
            return self._step_loss
        if batch.following is None and self.trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "trainer.accumulate_grad_batches: expected 1 with a loader that does not look ahead, got "
                f"{self.trainer.accumulate_grad_batches}; use InstructionDataModule's loader, or one that sets "
                "ResponseBatch.following on the first batch of each step."
            )
        others = [self.corrupt(other.to(self.device)) for other in batch.following or ()]
        step = StepLoss.of([corrupted, *others], self._over_processes)
        self.num_positions = self.num_positions + step.num_positions
        return step

    def _over_processes(self, values: Tensor) -> Tensor:
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def _log_step(self, step: StepLoss, loss: LossOutput) -> None:
        loss = replace(loss, sums=self._over_processes(step.sums), counts=step.counts)
        self.log_dict({f"train/{name}": mean for name, mean in loss.named_means().items()})
        self.log("train/loss", loss.total, prog_bar=True)
        self.log("train/num_positions", self.num_positions)
        self.log("train/padding", 1 - step.num_real / step.num_positions)
        now, num_positions = time.perf_counter(), float(self.num_positions)
        if self._since:
            rate = (num_positions - self._positions_before) / (now - self._since)
            self.log("train/positions_per_second", torch.tensor(rate, dtype=torch.float64))  # not the default, bf16
        self._positions_before, self._since = num_positions, now

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm of the gradient before clipping."""
        if self._logs_now():
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.log("train/gradient_norm", nn.utils.get_total_norm(gradients))

    def _logs_now(self) -> bool:
        every = max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        return (self.global_step + 1) % every == 0

    def configure_optimizers(self) -> Any:  # noqa: ANN401 - Lightning's dictionary
        """Make optimizer and schedule; norms and biases get no weight decay."""
        groups = parameter_groups(self.model)
        if self.optimizer_callable is None:
            optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.98), weight_decay=0.01)
        else:
            optimizer = self.optimizer_callable(groups)
        if self.scheduler_callable is not None:
            scheduler = self.scheduler_callable(optimizer)
        else:
            total = int(self.trainer.estimated_stepping_batches)
            scheduler = warmup_cosine(optimizer, self.warmup_steps, total, self.final_lr_ratio)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # --- validation ------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Stop the clock of training."""
        self._paused = time.perf_counter()

    def on_validation_end(self) -> None:
        """Let the clock of training run on."""
        self._since += (time.perf_counter() - self._paused) * (self._since > 0)

    def validation_step(self, batch: ResponseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Add a batch's loss at fixed mask ratios, the same in every run."""
        if not batch.ids:  # there are fewer samples than processes
            return
        strata = torch.remainder(batch.sample_keys, _NUM_STRATA)
        ratio = (strata.double() + 0.5) / _NUM_STRATA
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=-1)
        corrupted = self.objective.corrupt(batch, noise, self.model.special_tokens, mask_ratio=ratio)
        if self.validation_means is None:
            self.validation_means = TermMeans(corrupted.term_names, corrupted.coefficients).to(self.device)
        self.validation_means.update(self.loss(corrupted))

    def on_validation_epoch_end(self) -> None:
        """Log the validation losses and a few decoded samples."""
        if self.trainer.world_size > 1:
            self._know_the_terms()
        if self.validation_means is None:
            return
        means = self.validation_means.compute()
        self.validation_means = None  # made anew each time: tensors of inference mode cannot be updated outside it
        self.log("val/loss", means.pop("total").float(), prog_bar=True)
        self.log_dict({f"val/{name}": mean.float() for name, mean in means.items()})
        if not self.trainer.sanity_checking and self.trainer.is_global_zero and _is_whole(self.trainer.strategy):
            self._log_samples()

    def _know_the_terms(self) -> None:
        """Let a process without validation samples take part in the sums over processes; the first one has some."""
        means = self.validation_means
        terms = self.trainer.strategy.broadcast(means and (means.names, means.coefficients))
        if means is None and terms is not None:
            self.validation_means = TermMeans(*terms).to(self.device)

    def _log_samples(self) -> None:
        module = getattr(self.trainer, "datamodule", None)
        experiments = [getattr(logger, "experiment", None) for logger in self.loggers]
        writers: list[Any] = [experiment for experiment in experiments if hasattr(experiment, "add_text")]
        decoder = next(iter(self.decoders.values()))
        fits = not decoder.requirements().mismatches(self.model.traits)
        if module is None or not writers or not self.num_logged_samples or not fits:
            return
        batch: PromptBatch = module.sample_prompts(self.num_logged_samples)
        output = self._decode(decoder, batch)
        lines = [
            f"`{example.query}`\n\n    {self._text(row.token_ids)}\n\n(reference `{example.response}`)"
            for example, row in zip(batch.examples, output.rows, strict=True)
        ]
        for writer in writers:
            writer.add_text("samples", "\n\n".join(lines), self.global_step)

    # --- test and prediction ---------------------------------------------------------------------------------

    def on_test_start(self) -> None:
        """Check every decoder against the model before any work, and open the predictions files."""
        self.mismatches = {
            name: check_model(self.model, decoder, allow_mismatch=self.allow_mismatch)
            for name, decoder in self.decoders.items()
        }
        gather(self.model)
        self._open({f"predictions_{name}": name for name in self.decoders})
        self.test_metrics = nn.ModuleDict({name: DecodingMetrics() for name in self.decoders}).to(self.device)
        for name, metrics in self.test_metrics.items():
            assert isinstance(metrics, DecodingMetrics)
            metrics.restore(self._files[f"predictions_{name}"].state or {})

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Decode a batch of prompts with every decoder."""
        for name, decoder in self.decoders.items():
            file = self._files[f"predictions_{name}"]
            left = _left(batch, file.done)
            if not left.prompts:
                continue
            output = self._decode(decoder, left)
            lines = self._predictions(left, output)
            metrics = self.test_metrics[name]
            assert isinstance(metrics, DecodingMetrics)
            metrics.update(output, [line["score"] or 0.0 for line in lines])
            file.write(lines, metrics.snapshot())

    def on_test_epoch_end(self) -> None:
        """Print the table of decoders and write the results."""
        self.results = {}
        for name, metrics in self.test_metrics.items():
            assert isinstance(metrics, DecodingMetrics)
            self.results[name] = metrics.compute()
            for figure, value in self.results[name].items():
                self.log(f"test/{name}/{figure}", float(value))
        self._merge()
        if self.trainer.is_global_zero:
            decoder_table(self.results, self.batch_size, marked={n for n, why in self.mismatches.items() if why})
            self._write_results()
            self._write_report()
        self._forget()

    def on_predict_start(self) -> None:
        """Check the decoder and open the predictions file."""
        check_model(self.model, next(iter(self.decoders.values())), allow_mismatch=self.allow_mismatch)
        gather(self.model)
        self._open({"predictions": next(iter(self.decoders))})

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Decode a batch with the first decoder, write and return its predictions."""
        file = self._files["predictions"]
        left = _left(batch, file.done)
        if not left.prompts:
            return []
        lines = self._predictions(left, self._decode(next(iter(self.decoders.values())), left))
        file.write(lines)
        return lines

    def on_predict_end(self) -> None:
        """Close the predictions file."""
        self._merge()
        self._forget()

    def _decode(self, decoder: Decoder, batch: PromptBatch) -> DecodingOutput:
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
                    max_batch_size=self.max_batch_size,
                    max_tokens_per_forward=self.max_tokens_per_forward,
                    detokenize=self._detokenize,
                    allow_mismatch=self.allow_mismatch,
                )
        finally:
            self.model.train(training)

    def _detokenize(self, token_ids: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _text(self, token_ids: list[int]) -> str:
        return cut_at_stop(self._detokenize(token_ids), self.sampling.stop)

    def _predictions(self, batch: PromptBatch, output: DecodingOutput) -> list[dict[str, Any]]:
        task = self.trainer.datamodule.task  # type: ignore[attr-defined]
        lines = []
        for example, row in zip(batch.examples, output.rows, strict=True):
            text = self._text(row.token_ids)
            lines.append(
                prediction(
                    row,
                    prompt=example.query,
                    response=text,
                    reference=example.response,
                    score=task.score(example, text),
                    record_forwards=self.record_forwards,
                )
            )
        return lines

    def _open(self, names: Mapping[str, str]) -> None:
        """Open predictions files, each for a decoder by its name, when all prompts fit the model."""
        data = getattr(self.trainer, "datamodule", None)
        check_context(self.model, data.prompt_lengths() if data else {}, self.sampling.max_new_tokens)
        self._directory = self.output_directory  # known to all processes only when all ask for it
        shared = {
            "checkpoint": str(self.trainer.ckpt_path or self.backbone_config.source),
            "sampling": asdict(self.sampling),
            "record_forwards": self.record_forwards,
        }
        self._files = {
            file: PredictionsFile(
                self._directory,
                file,
                {**shared, "decoder": _described(self.decoders[name])},
                rank=self.trainer.global_rank,
                num_ranks=self.trainer.world_size,
                resume=self.resume,
            )
            for file, name in names.items()
        }

    def _merge(self) -> None:
        for file in self._files.values():
            file.close()
        self.trainer.strategy.barrier("predictions")
        if self.trainer.is_global_zero:
            for file in self._files.values():
                file.merge()

    def _forget(self) -> None:
        for file in self._files.values():
            file.forget()

    @property
    def output_directory(self) -> Path:
        """Where results go: the first logger's directory."""
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

    @property
    def batch_size(self) -> int:
        """The most prompts that can share a call in a test: no more than the loader hands over."""
        module = getattr(self.trainer, "datamodule", None)
        return min(self.max_batch_size, getattr(module, "eval_batch_size", self.max_batch_size))

    def _write_report(self) -> None:
        """Write the page beside the results, which are safe by now whatever happens here."""
        try:
            page = write_report([self._directory / "results.json"])[0]
        except (ValueError, OSError) as error:
            warnings.warn(f"the results are written, but no report: {error}", stacklevel=2)
        else:
            rank_zero_info(f"report: {page}")

    def _write_results(self) -> None:
        options = {name: _described(decoder) for name, decoder in self.decoders.items()}
        results = {
            "sampling": asdict(self.sampling),
            "max_batch_size": self.max_batch_size,
            "batch_size": self.batch_size,
            "max_tokens_per_forward": self.max_tokens_per_forward,
            "decoders": options,
            "results": self.results,
            "mismatches": self.mismatches,
            "environment": environment_of(self._directory, self.seed),
            "config": config_of(self._directory),
        }
        path = self._directory / "results.json"
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _described(decoder: Decoder) -> Mapping[str, Any]:
    return {"class": type(decoder).__name__, **asdict(decoder)}  # type: ignore[call-overload] - a dataclass


def _is_whole(strategy: Strategy) -> bool:
    """Whether one process can run the model without the others, for its weights are not sharded."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


def _left(batch: PromptBatch, done: Set[str]) -> PromptBatch:
    """Return a batch without the prompts that are done."""
    kept = [i for i, prompt in enumerate(batch.prompts) if prompt.id not in done]
    return replace(batch, prompts=[batch.prompts[i] for i in kept], examples=[batch.examples[i] for i in kept])


def check_decoder_name(name: str) -> None:
    """Refuse a name that cannot be part of an option's, a metric's and a file's name.

    Raises:
        ValueError: If it holds anything but letters, digits, ``_`` and ``-``.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"decoders: expected names of letters, digits, _ and -, got {name!r}; rename it.")


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split trainable parameters: matrices take the optimizer's weight decay, norms and biases none."""
    is_trained: Callable[[Tensor], bool] = lambda p: p.requires_grad  # noqa: E731
    parameters = [p for p in module.parameters() if is_trained(p)]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
