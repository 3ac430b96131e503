"""The LightningModule: training, validation, test and prediction with one backbone, objective and set of decoders."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from refusion_lit.api import TextModel, cut_at_stop
from refusion_lit.bundle import BUNDLE_KEY, Bundle, describe
from refusion_lit.decoding import Decoder, DecodingOutput, ReFusion, decode
from refusion_lit.decoding.engine import check_model
from refusion_lit.metrics import DecodingMetrics, TermMeans
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid, Objective
from refusion_lit.predictions import prediction, write_line
from refusion_lit.reports.tables import decoder_table
from refusion_lit.schedule import warmup_cosine
from refusion_lit.types import CorruptedBatch, LossOutput, PromptBatch, ResponseBatch, SamplingParams

_NUM_STRATA = 16


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
        self.backbone: Backbone | None = None
        self._traits_from_checkpoint = False
        self.validation_means: TermMeans | None = None
        self.test_metrics = nn.ModuleDict()
        self._files: dict[str, TextIO] = {}
        self._open_files = ExitStack()
        self._tokens_since, self._since = 0, 0.0
        self.results: dict[str, dict[str, float]] = {}
        for decoder in self.decoders.values():
            decoder.check(sampling)

    # --- model -----------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the backbone, once, when the tokenizer is known."""
        if self.backbone is not None:
            return
        if self.tokenizer is None:
            raise ValueError("tokenizer: expected one, got None; pass the data module's built_tokenizer.")
        self.backbone = self.backbone_config.build(self.tokenizer, seed=self.seed)

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

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what the stored weights were trained for."""
        if BUNDLE_KEY in checkpoint:
            self.model.traits = Bundle.from_checkpoint(checkpoint, "checkpoint").traits

    # --- training --------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Note what the weights will be trained for."""
        self.model.traits = self.objective.traits
        self.model.train()

    def corrupt(self, batch: ResponseBatch) -> CorruptedBatch:
        """Corrupt a training batch with noise that depends on seed, epoch and samples alone."""
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=self.seed, epoch=self.current_epoch)
        return self.objective.corrupt(batch, noise, self.model.special_tokens)

    def loss(self, corrupted: CorruptedBatch) -> LossOutput:
        """Run the backbone and return the loss."""
        hidden = self.model(corrupted.input_ids, corrupted.position_ids, corrupted.attention_mask)
        return self.objective.loss(hidden, self.model.logits, corrupted)

    def training_step(self, batch: ResponseBatch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Return the loss of a batch, and log it by terms."""
        corrupted = self.corrupt(batch)
        loss = self.loss(corrupted)
        total = loss.total
        self._tokens_since += batch.input_ids.numel()
        if self._logs_now():
            self.log_dict({f"train/{name}": mean for name, mean in loss.named_means().items()})
            self.log("train/loss", total.detach(), prog_bar=True)
            now = time.perf_counter()
            if self._since:
                self.log("train/tokens_per_second", self._tokens_since / (now - self._since))
            self._tokens_since, self._since = 0, now
        return total

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

    def validation_step(self, batch: ResponseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Add a batch's loss at fixed mask ratios, the same in every run."""
        strata = torch.remainder(batch.sample_keys, _NUM_STRATA)
        ratio = (strata.double() + 0.5) / _NUM_STRATA
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=-1)
        corrupted = self.objective.corrupt(batch, noise, self.model.special_tokens, mask_ratio=ratio)
        if self.validation_means is None:
            self.validation_means = TermMeans(corrupted.term_names, corrupted.coefficients).to(self.device)
        self.validation_means.update(self.loss(corrupted))

    def on_validation_epoch_end(self) -> None:
        """Log the validation losses and a few decoded samples."""
        if self.validation_means is None:
            return
        means = self.validation_means.compute()
        self.validation_means = None  # made anew each time: tensors of inference mode cannot be updated outside it
        self.log("val/loss", means.pop("total").float(), prog_bar=True)
        self.log_dict({f"val/{name}": mean.float() for name, mean in means.items()})
        if not self.trainer.sanity_checking and self.trainer.is_global_zero:
            self._log_samples()

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
        self.test_metrics = nn.ModuleDict({name: DecodingMetrics() for name in self.decoders}).to(self.device)
        self._open(f"predictions_{name}" for name in self.decoders)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Decode a batch of prompts with every decoder."""
        for name, decoder in self.decoders.items():
            output = self._decode(decoder, batch)
            lines = self._predictions(batch, output)
            metrics = self.test_metrics[name]
            assert isinstance(metrics, DecodingMetrics)
            metrics.update(output, [line["score"] or 0.0 for line in lines])
            for line in lines:
                write_line(self._files[f"predictions_{name}"], line)

    def on_test_epoch_end(self) -> None:
        """Print the table of decoders and write the results."""
        self.results = {}
        for name, metrics in self.test_metrics.items():
            assert isinstance(metrics, DecodingMetrics)
            self.results[name] = metrics.compute()
            for figure, value in self.results[name].items():
                self.log(f"test/{name}/{figure}", float(value))
        self._open_files.close()
        if self.trainer.is_global_zero:
            decoder_table(self.results, self.max_batch_size, marked={n for n, why in self.mismatches.items() if why})
            self._write_results()

    def on_predict_start(self) -> None:
        """Check the decoder and open the predictions file."""
        check_model(self.model, next(iter(self.decoders.values())), allow_mismatch=self.allow_mismatch)
        self._open(["predictions"])

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Decode a batch with the first decoder, write and return its predictions."""
        lines = self._predictions(batch, self._decode(next(iter(self.decoders.values())), batch))
        for line in lines:
            write_line(self._files["predictions"], line)
        return lines

    def on_predict_end(self) -> None:
        """Close the predictions file."""
        self._open_files.close()

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

    def _open(self, names: Iterable[str]) -> None:
        directory = self.output_directory
        directory.mkdir(parents=True, exist_ok=True)
        self._open_files = ExitStack()
        suffix = "" if self.trainer.world_size == 1 else f"_rank{self.trainer.global_rank}"
        self._files = {
            name: self._open_files.enter_context((directory / f"{name}{suffix}.jsonl").open("w", encoding="utf-8"))
            for name in names
        }

    @property
    def output_directory(self) -> Path:
        """Where results go: the first logger's directory."""
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

    def _write_results(self) -> None:
        options = {n: {"class": type(d).__name__, **_options(d)} for n, d in self.decoders.items()}
        results = {
            "sampling": asdict(self.sampling),
            "max_batch_size": self.max_batch_size,
            "max_tokens_per_forward": self.max_tokens_per_forward,
            "decoders": options,
            "results": self.results,
            "mismatches": self.mismatches,
        }
        path = self.output_directory / "results.json"
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _options(decoder: Decoder) -> Mapping[str, Any]:
    return asdict(decoder)  # type: ignore[call-overload] - decoders are dataclasses


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split trainable parameters: matrices take the optimizer's weight decay, norms and biases none."""
    is_trained: Callable[[Tensor], bool] = lambda p: p.requires_grad  # noqa: E731
    parameters = [p for p in module.parameters() if is_trained(p)]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
