"""The LightningModule: training, validation, test and prediction with one backbone, objective and set of decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from refusion_lit.api import TextModel
from refusion_lit.checkpoints.metadata import METADATA_KEY, CheckpointMetadata, collect_metadata
from refusion_lit.checkpoints.models import merged_weights
from refusion_lit.checkpoints.stored import check_weights
from refusion_lit.decoding import Decoder, ReFusion, check_context, check_model
from refusion_lit.evaluation.loop import Answerer, Evaluation, check_decoder_name, described
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.fsdp import gather, shard
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.objectives import Hybrid, Objective
from refusion_lit.objectives.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.objectives.cross_entropy import check_kernel
from refusion_lit.objectives.packing import pack
from refusion_lit.reports.results import write_results
from refusion_lit.reports.tables import decoder_table
from refusion_lit.reports.write import write_test_report
from refusion_lit.training.progress import TrainingProgress
from refusion_lit.training.schedule import parameter_groups, warmup_cosine
from refusion_lit.training.validation import ValidationLoss, corrupt_evenly, samples_as_text, text_writers
from refusion_lit.types import PromptBatch, SamplingParams

__all__ = ["SlotDiffusionModule", "check_decoder_name", "parameter_groups"]

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
        results: Of each decoder's name the figures of the last test.
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
        self.results: dict[str, dict[str, float]] = {}
        self.mismatches: dict[str, list[str]] = {}
        # What a run remembers; made anew for each.
        self._progress = TrainingProgress()
        self._validation: ValidationLoss | None = None
        self._evaluation: Evaluation | None = None
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
        checkpoint[METADATA_KEY] = collect_metadata(self.model, self.tokenizer, self.prompt_template).to_checkpoint()
        checkpoint[_NUM_POSITIONS] = int(self.num_positions)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what the stored weights were trained for; refuse those of another model."""
        if METADATA_KEY in checkpoint:
            metadata = CheckpointMetadata.from_checkpoint(checkpoint, "the checkpoint")
            if self.tokenizer is not None:
                metadata.check_tokenizer(self.tokenizer)
            self.model.traits = metadata.traits
            is_fit = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
            if metadata.adapters is not None and self.model.adapters is None and not is_fit:
                checkpoint["state_dict"] = merged_weights(checkpoint["state_dict"], metadata)
        if "state_dict" in checkpoint and (self._trainer is None or _is_whole(self._trainer.strategy)):
            check_weights(checkpoint["state_dict"], self.state_dict(), "ckpt_path")
        self._progress = TrainingProgress(checkpoint.get(_NUM_POSITIONS, 0))

    # --- training --------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Check what training needs, and note what the weights will be trained for."""
        check_kernel(self.objective.kernel, self.device)
        self.model.traits = self.objective.traits
        self.model.train()
        self._progress.start(self.device, self.trainer.world_size)

    @property
    def num_positions(self) -> Tensor:
        """Token positions that training has computed on all processes; a resumed run goes on counting.

        Padding, second views and clean copies count as much as any other.
        """
        return self._progress.num_positions

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
        num_accumulated = self.trainer.accumulate_grad_batches
        step = self._progress.step_of(
            batch, corrupted, lambda other: self.corrupt(other.to(self.device)), num_accumulated=num_accumulated
        )
        loss = self.loss(corrupted)
        share = step.share(loss)
        if step.num_left == 0 and self._logs_now():
            for name, value in self._progress.figures(step, loss).items():
                self.log(f"train/{name}", value, prog_bar=name == "loss")
        # Lightning divides by the number of accumulated batches, and gradients are averaged over processes.
        return share * (num_accumulated * self.trainer.world_size)

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
        self._progress.pause()
        self._validation = ValidationLoss(self.device)

    def on_validation_end(self) -> None:
        """Let the clock of training run on."""
        self._progress.go_on()

    def validation_step(self, batch: ResponseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Add a batch's loss at fixed mask ratios, the same in every run."""
        if not batch.ids:  # there are fewer samples than processes
            return
        assert self._validation is not None
        corrupted = corrupt_evenly(self.objective, batch, self.model.special_tokens)
        self._validation.add(corrupted, self.loss(corrupted))

    def on_validation_epoch_end(self) -> None:
        """Log the validation losses and a few decoded samples."""
        assert self._validation is not None
        means = self._validation.means(self.trainer.strategy.broadcast)
        if not means:
            return
        self.log("val/loss", means.pop("total").float(), prog_bar=True)
        self.log_dict({f"val/{name}": mean.float() for name, mean in means.items()})
        if not self.trainer.sanity_checking and self.trainer.is_global_zero and _is_whole(self.trainer.strategy):
            self._log_samples()

    def _log_samples(self) -> None:
        module = getattr(self.trainer, "datamodule", None)
        writers = text_writers(self.loggers)
        decoder = next(iter(self.decoders.values()))
        fits = not decoder.requirements().mismatches(self.model.traits)
        if module is None or not writers or not self.num_logged_samples or not fits:
            return
        batch: PromptBatch = module.sample_prompts(self.num_logged_samples)
        answerer = self._answerer()
        responses = [answerer.text(row) for row in answerer.decode(decoder, batch).rows]
        for writer in writers:
            writer.add_text("samples", samples_as_text(batch, responses), self.global_step)

    # --- test and prediction ---------------------------------------------------------------------------------

    def on_test_start(self) -> None:
        """Check every decoder against the model before any work, and open the predictions files."""
        self.mismatches = {
            name: check_model(self.model, decoder, allow_mismatch=self.allow_mismatch)
            for name, decoder in self.decoders.items()
        }
        self._evaluation = self._start(self.decoders, "predictions_{}", counted=True)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Decode a batch of prompts with every decoder."""
        self._running.step(batch)

    def on_test_epoch_end(self) -> None:
        """Print the table of decoders and write the results."""
        self.results = self._running.figures()
        for name, figures in self.results.items():
            for figure, value in figures.items():
                self.log(f"test/{name}/{figure}", float(value))
        self._running.merge(self.trainer.strategy)
        if self.trainer.is_global_zero:
            decoder_table(self.results, self.batch_size, marked={n for n, why in self.mismatches.items() if why})
            write_test_report(write_results(self._running.directory, self._summary(), seed=self.seed))
        self._running.forget()

    def _summary(self) -> dict[str, Any]:
        return {
            "sampling": asdict(self.sampling),
            "max_batch_size": self.max_batch_size,
            "batch_size": self.batch_size,
            "max_tokens_per_forward": self.max_tokens_per_forward,
            "decoders": {name: described(decoder) for name, decoder in self.decoders.items()},
            "results": self.results,
            "mismatches": self.mismatches,
        }

    def on_predict_start(self) -> None:
        """Check the decoder and open the predictions file."""
        name, decoder = next(iter(self.decoders.items()))
        check_model(self.model, decoder, allow_mismatch=self.allow_mismatch)
        self._evaluation = self._start({name: decoder}, "predictions", counted=False)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Decode a batch with the first decoder, write and return its predictions."""
        return self._running.step(batch)

    def on_predict_end(self) -> None:
        """Close the predictions file."""
        self._running.merge(self.trainer.strategy)
        self._running.forget()

    @property
    def _running(self) -> Evaluation:
        assert self._evaluation is not None, "no test or prediction has been started"
        return self._evaluation

    def _answerer(self) -> Answerer:
        return Answerer(
            model=self.model,
            detokenize=self._detokenize,
            sampling=self.sampling,
            max_batch_size=self.max_batch_size,
            max_tokens_per_forward=self.max_tokens_per_forward,
            allow_mismatch=self.allow_mismatch,
        )

    def _detokenize(self, token_ids: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _start(self, decoders: Mapping[str, Decoder], file_name: str, *, counted: bool) -> Evaluation:
        """Open the predictions files, when all prompts fit the model."""
        gather(self.model)
        data: Any = getattr(self.trainer, "datamodule", None)
        check_context(self.model, data.prompt_lengths() if data else {}, self.sampling.max_new_tokens)
        return Evaluation(
            self._answerer(),
            decoders,
            data.task,
            self.output_directory,  # known to all processes only when all ask for it
            file_name=file_name,
            checkpoint=str(self.trainer.ckpt_path or self.backbone_config.source),
            record_forwards=self.record_forwards,
            counted_on=self.device if counted else None,
            rank=self.trainer.global_rank,
            num_ranks=self.trainer.world_size,
            resume=self.resume,
        )

    @property
    def output_directory(self) -> Path:
        """Where results go: the first logger's directory."""
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

    @property
    def batch_size(self) -> int:
        """The most prompts that can share a call in a test: no more than the loader hands over."""
        module = getattr(self.trainer, "datamodule", None)
        return min(self.max_batch_size, getattr(module, "eval_batch_size", self.max_batch_size))


def _is_whole(strategy: Strategy) -> bool:
    """Whether one process can run the model without the others, for its weights are not sharded."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
