"""The LightningModule: model and training. Validation and evaluation are callbacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, instantiate_class
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.checkpoints.files import check_weights
from refusion_lit.checkpoints.metadata import METADATA_KEY, CheckpointMetadata
from refusion_lit.checkpoints.models import restore_metadata
from refusion_lit.data.evaluation import PromptBatch
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import check_vocabulary
from refusion_lit.decoding import Decoder
from refusion_lit.evaluation.loop import Evaluation, EvaluationOptions
from refusion_lit.families.defaults import entry_with_decoder
from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.objective import corrupt_and_check
from refusion_lit.learning.packing import lay_out
from refusion_lit.learning.step import MicroBatch, OptimizerStep
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.fsdp import shard
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.objectives import Hybrid, Objective
from refusion_lit.text_model import TextModel
from refusion_lit.training.callbacks import SaveLastStep, check_callbacks
from refusion_lit.training.figures import TrainingFigures
from refusion_lit.training.optimizer import (
    WarmupCosine,
    apply_optimizer_options,
    check_finite,
    gradient_norm,
    make_optimizer,
    make_scheduler,
    read_optimizer_options,
    rehearse,
    warn_of_slow_precision,
)
from refusion_lit.training.resume import begin_resumed_epoch, correct_counters
from refusion_lit.training.step_source import StepSource
from refusion_lit.training.validation import Validation
from refusion_lit.types import SamplingParams
from refusion_lit.utils.require import require, require_template

_NUM_POSITIONS = "refusion_lit_num_positions"
_OPTIMIZER = "refusion_lit_optimizer"


class SlotDiffusionModule(L.LightningModule):
    """Trains a language model with an objective and evaluates decoders on it.

    Args:
        backbone: Options of the model: its source, training and decoding.
        tokenizer: The data module's tokenizer; the command line links it.
        objective: The training objective.
        decoders: Decoders by name. ``test`` compares them; ``predict`` uses the first. By default, the model's default
            decoder (ReFusion for a hybrid model). ``null`` drops a decoder from an earlier config.
        sampling: Options for sampling: length limit, temperature and others.
        decoding: Options for running decoders in evaluation.
        optimizer: Makes the optimizer from parameter groups; AdamW by default. Norms and biases get no weight decay.
        lr_scheduler: Makes the learning-rate schedule from the optimizer; ``schedule`` by default.
        schedule: The default learning-rate schedule.
        seed: Seeds the initial weights and the training noise. The noise depends on seed, epoch and sample only.
        prompt_template: Turns a query into a prompt if the tokenizer has no chat template; ``None``: ``{query}``.
        resume: Resume an interrupted ``test`` or ``predict`` run from the predictions in its directory.

    Attributes:
        evaluation: Tests and predicts. ``evaluation.results`` has the last test's figures by decoder name.
        figures: The state of training between two batches.
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        objective: Objective = Hybrid(),  # noqa: B008 - immutable
        decoders: dict[str, Decoder | None] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - immutable
        decoding: EvaluationOptions = EvaluationOptions(),  # noqa: B008 - immutable
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        schedule: WarmupCosine = WarmupCosine(),  # noqa: B008 - immutable
        seed: int = 0,
        prompt_template: str | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(backbone, str | Path):
            backbone = BackboneConfig(source=str(backbone))
        is_config = isinstance(backbone, BackboneConfig)
        expected = "a BackboneConfig, or a directory or hub id of a model of transformers"
        fix = "pass BackboneConfig(source=...), or BackboneConfig(config=...) for random weights"
        require(is_config, "model.backbone", expected, type(backbone).__name__, fix)
        is_tokenizer = tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase)
        fix = "pass the data module's built_tokenizer, or leave it out: trainer.fit(module, data) then passes it"
        require(is_tokenizer, "tokenizer", "a tokenizer of transformers", type(tokenizer).__name__, fix)
        for option, value, kind in (
            ("objective", objective, Objective),
            ("sampling", sampling, SamplingParams),
            ("decoding", decoding, EvaluationOptions),
            ("schedule", schedule, WarmupCosine),
        ):
            fix = "pass an instance, such as Hybrid()" if kind is Objective else f"pass {kind.__name__}(...)"
            require(isinstance(value, kind), f"model.{option}", f"an instance of {kind.__name__}", value, fix)
        for option, function in {"optimizer": optimizer, "lr_scheduler": lr_scheduler}.items():
            fix = "pass a class of torch, or a functools.partial of it with its options"
            expected = f"a function that makes the {option.replace('lr_', '')}"
            require(function is None or callable(function), f"model.{option}", expected, function, fix)
        self.backbone_config = backbone
        self.tokenizer = tokenizer
        self.objective = objective
        self.optimizer_callable = optimizer
        self.scheduler_callable = lr_scheduler
        self.schedule = schedule
        self.seed = seed
        self.prompt_template = require_template(prompt_template or "{query}")
        self.evaluation = Evaluation(decoders or {}, sampling, decoding, seed=seed, resume=resume)
        self.backbone: Backbone | None = None
        self.figures = TrainingFigures()
        self.validation = Validation(objective, self.figures)
        source = objective.step_source or f"{StepSource.__module__}.{StepSource.__name__}"
        self.step_source: StepSource = instantiate_class((objective, self.evaluation, seed), {"class_path": source})
        self._is_resumed = False
        self._optimizer_options: dict[str, Any] = {}
        self._restored_options: dict[str, Any] = {}

    def configure_model(self) -> None:
        """Build the backbone once the tokenizer is known, and shard it if the strategy does."""
        if self.backbone is not None:
            return
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        if self.tokenizer is None and isinstance(data, InstructionDataModule):
            self.tokenizer = data.built_tokenizer
        if self.tokenizer is None:
            fix = "pass an InstructionDataModule to Trainer.fit, or its built_tokenizer to this class"
            raise ValueError(f"tokenizer: expected a tokenizer, got None; {fix}.")
        check_vocabulary(self.tokenizer, self.backbone_config)
        if self._trainer is not None:
            warn_of_slow_precision(str(self.trainer.precision), self.trainer.strategy.root_device)
        is_sharded = self.device_mesh is not None
        check = None
        decodes = self._trainer is not None and (self.trainer.testing or self.trainer.predicting)
        if decodes and isinstance(data, InstructionDataModule):
            prompts = PromptBatch(data.test_prompts()).prompts
            check = partial(self.evaluation.check_plan, prompts=prompts, is_test=self.trainer.testing)
        options: dict[str, Any] = {"seed": self.seed, "is_sharded": is_sharded, "check": check}
        self.backbone = self.backbone_config.build(self.tokenizer, **options)
        if self._trainer is not None:  # before Lightning restores weights, which float32 would round
            self.trainer.precision_plugin.convert_module(self.backbone)
        if self.device_mesh is not None:
            mixed = self.trainer.precision == "bf16-mixed"
            shard(self.backbone, self.device_mesh["data_parallel"], compute_dtype=torch.bfloat16 if mixed else None)

    @property
    def model(self) -> Backbone:
        """The backbone, after :meth:`configure_model`."""
        assert self.backbone is not None, "configure_model has not been called"
        return self.backbone

    def text_model(self) -> TextModel:
        """Return the model with the Python interface for generation."""
        self.configure_model()
        assert self.tokenizer is not None
        return TextModel(self.model, self.tokenizer, self.prompt_template)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store everything needed for loading the model, but no test-time options."""
        checkpoint[METADATA_KEY] = CheckpointMetadata.from_model(self.text_model()).to_checkpoint()
        checkpoint[_NUM_POSITIONS] = int(self.figures.num_positions)
        checkpoint[_OPTIMIZER] = self._optimizer_options

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the model's traits and training state; refuse another model's weights."""
        trainer = self._trainer
        resumes = trainer is not None and trainer.state.fn == "fit"
        if resumes and "fit_loop" in checkpoint.get("loops", {}):
            correct_counters(checkpoint["loops"]["fit_loop"])
        if trainer is not None and resumes:
            for callback in trainer.early_stopping_callbacks:  # Lightning would restore the checkpoint's patience
                state = checkpoint.get("callbacks", {}).get(callback.state_key)
                if state is not None:
                    state["patience"] = callback.patience
        if METADATA_KEY in checkpoint:
            restore_metadata(checkpoint, self.model, self.tokenizer, resumes=resumes)
        # A strategy that shards the weights restores them after the setup; no process holds them all.
        if "state_dict" in checkpoint and (trainer is None or not trainer.strategy.restore_checkpoint_after_setup):
            check_weights(checkpoint["state_dict"], self.state_dict(), getattr(trainer, "ckpt_path", None))
        self._restored_options = checkpoint[_OPTIMIZER] if resumes else {}
        self._is_resumed = resumes
        self.figures.num_positions = torch.tensor(checkpoint.get(_NUM_POSITIONS, 0), dtype=torch.float64)

    def on_fit_start(self) -> None:
        """Check data and model before training, and record the objective's traits in the model."""
        module = getattr(self.trainer, "datamodule", None)
        data = module if isinstance(module, InstructionDataModule) else None
        self._check_mask(data.training_prompt().token_ids if data else ())
        in_text_order = {*(self.objective.traits.predictions or ())} <= {"next_token", "visible"}
        context = self.model.context(in_text_order=in_text_order)
        if data and context is not None:
            data.check_context(context)
        if data:
            for line in data.describe().splitlines():
                rank_zero_info(line)
            data.warn_of_shared_samples()
        self.step_source.start(self)
        self._check_attention()
        self.model.traits = self.objective.traits
        self._name_decoder()
        self._warn_of_misfits()
        if data:
            self._warn_of_long_canvas(data)
        self.model.train()
        self.figures.start(self.device)

    def _check_attention(self) -> None:
        """Refuse an attention pattern in the backbone's options, because the objective would replace it."""
        traits, fix = self.objective.traits, "leave it out, because the objective chooses the pattern"
        for name in ("attention", "block_size"):
            value, trained = getattr(self.backbone_config, name), getattr(traits, name)
            expected = f"{trained}, with which {type(self.objective).__name__} trains"
            require(value in (None, trained), f"model.backbone.{name}", expected, value, fix)

    def _check_mask(self, prompt: Sequence[int]) -> None:
        """Refuse a mask token that is also another special token or part of the template."""
        assert self.tokenizer is not None
        tokens = self.model.special_tokens
        others = [*tokens.eos_token_ids, tokens.pad_token_id, self.tokenizer.bos_token_id, *prompt]
        has_masks = any("mask" in prediction for prediction in self.objective.traits.predictions or ())
        is_unique = not has_masks or tokens.mask_token_id is None or tokens.mask_token_id not in others
        got = f"{self.tokenizer.mask_token}, which ends, begins or pads texts or is part of prompts"
        fix = "remove mask_token from tokenizer_config.json and mask_token_id from config.json, to add a mask token"
        require(is_unique, "data.tokenizer", "a mask token of its own", got, fix)

    def _name_decoder(self) -> None:
        """If the objective comes from another package, store the config's first fitting decoder in the model."""
        config = self.model.config
        stored = getattr(config, "refusion_lit", None) or {}
        decoders = self.evaluation.named_decoders.values() if self.model.drafter is None else ()
        entry = entry_with_decoder(stored, self.model.traits, decoders, type(self.objective))
        if entry != stored:
            config.refusion_lit = entry

    def _warn_of_misfits(self) -> None:
        """Warn before training about decoders in the config that a test will refuse."""
        if self.evaluation.options.allow_mismatch:
            return
        for name, decoder in self.evaluation.named_decoders.items():
            for reason in decoder.requirements().mismatches(self.model.traits)[:1]:
                what = f"model.decoders.{name}: {type(decoder).__name__} does not fit what the objective trains"
                rank_zero_warn(f"{what}: {reason}; `refusion-lit test` will refuse the decoder, so name another.")

    def _warn_of_long_canvas(self, data: InstructionDataModule) -> None:
        """Warn if decoders' canvases are longer than in training, where the model learns to end responses."""
        longest = data.longest_response()
        trained = None if longest is None else self.objective.trained_canvas(longest)
        canvas = self.evaluation.sampling.max_new_tokens
        if trained is not None and canvas > trained:
            rank_zero_warn(
                f"model.sampling.max_new_tokens: expected at most {trained}, the longest canvas in training, got "
                f"{canvas}: on a longer canvas, the model does not learn where responses end, and many are empty. "
                f"Lower max_new_tokens, or set objective.pad_responses_to to {canvas}."
            )

    def on_fit_end(self) -> None:
        """Refuse a training that has ended without an optimizer step."""
        fix = "raise trainer.max_time, or trainer.limit_train_batches"
        has_trained = bool(self.figures.sample_ids)
        require(has_trained, "fit", "time and batches for a step", "none, and no step was done", fix)

    def on_train_start(self) -> None:
        """Complete Lightning's restoring from a checkpoint: the optimizer's options, and the position in the epoch.

        Raises:
            ValueError: If the checkpoint has the state of another optimizer, or of a schedule with other options.
        """
        optimizer, decoupled = self.trainer.optimizers[0], "decoupled_weight_decay"  # differs between Adam and AdamW
        group, defaults = optimizer.param_groups[0], optimizer.defaults
        fits = defaults.keys() <= group.keys() and defaults.get(decoupled) == group.get(decoupled)
        fix = "name the optimizer that wrote it, or start from its exported weights as model.backbone.source"
        require(fits, "model.optimizer", "the optimizer of the checkpoint", type(optimizer).__name__, fix)
        if self._is_resumed:
            scheduler = self.trainer.lr_scheduler_configs[0].scheduler
            apply_optimizer_options(optimizer, scheduler, self._restored_options, self._optimizer_options)
            begin_resumed_epoch(self.trainer)
            self._is_resumed = False  # a later fit may start at the beginning

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        """Seed dropout by batch, so that a resumed run draws the same masks.

        Raises:
            ValueError: If the batch comes from another loader than an InstructionDataModule's.
        """
        _require_batch(batch, MicroBatch, ResponseBatch)
        key = stable_key("batch", self.seed, self.current_epoch, batch_idx, self.global_rank)
        seed = key & (1 << 63) - 1
        if self.device.type == "cpu":  # torch.manual_seed also keeps a stack trace of every call for absent devices
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    @property
    def training_objective(self) -> Objective:
        """The objective at this step."""
        objective = self.objective
        start = objective.at(0.0)
        if start is objective or self._trainer is None or not self.global_step:
            return start
        return objective.at(self.global_step / self._num_steps)

    @property
    def _num_steps(self) -> int:
        """Number of optimizer steps in the whole training."""
        num_steps = self.trainer.estimated_stepping_batches
        expected = "a number above 0 here or in trainer.max_epochs"
        require(0 < num_steps < math.inf, "trainer.max_steps", expected, self.trainer.max_steps, "set one of them")
        return int(num_steps)

    def corrupt(self, batch: ResponseBatch) -> CorruptedBatch:
        """Corrupt a training batch with noise that depends on seed, epoch and samples only; pack it if packing is on.

        Positions that no target needs are left out.
        """
        batch = batch.to(self.device)
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=self.seed, epoch=self.current_epoch)
        corrupted = corrupt_and_check(self.training_objective, batch, noise, self.model.special_tokens)
        return self._lay_out(corrupted, batch.rows)

    def _lay_out(self, corrupted: CorruptedBatch, rows: Tensor | None = None) -> CorruptedBatch:
        """If the objective allows other rows, pack the batch without positions that no target needs."""
        if rows is None and not self.objective.packs:
            return corrupted
        return lay_out(corrupted, rows, pad_token_id=self.model.special_tokens.pad_token_id)

    def loss(self, corrupted: CorruptedBatch) -> LossOutput:
        """Run the backbone and return the loss."""
        hidden = self.model(
            corrupted.input_ids,
            corrupted.position_ids,
            corrupted.visible,
            num_drafts=corrupted.num_drafts,
            num_canvas=corrupted.num_canvas,
            is_conditioned=corrupted.is_conditioned,
        )
        return self.objective.loss(hidden, self.model.head, corrupted)

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Return a micro-batch's share of the step's loss; log the step's loss after the last micro-batch."""
        num_accumulated = self.trainer.accumulate_grad_batches
        if isinstance(batch, ResponseBatch):  # of a loader that does not look ahead
            fix = "use the loader of InstructionDataModule"
            require(num_accumulated == 1, "trainer.accumulate_grad_batches", "1 with this loader", num_accumulated, fix)
            batch = MicroBatch(OptimizerStep((batch,)), 0)
        if batch.index == 0:
            batch.step.begin(self.step_source.corrupt(self, batch.step))
            self.figures.begin_step(batch.step)
        loss = self.loss(batch.step.take(batch.index))
        self.figures.add(loss)
        if batch.is_last and self._logs_now():
            source_figures = self.step_source.figures
            for name, value in ({**source_figures} | self.figures.compute()).items():
                shown = name in ("loss", *self.step_source.shown)
                differs = name in source_figures and self.trainer.world_size > 1  # between processes
                self.log(f"train/{name}", value, prog_bar=shown, sync_dist=differs)
        # Undoes Lightning's mean over micro-batches, and the mean over processes.
        return loss.total * (num_accumulated * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient's norm before clipping; stop if the norm or the loss is not finite.

        Raises:
            ValueError: Naming step, samples and the last checkpoint.
        """
        norm = gradient_norm(optimizer)
        check_finite(self.trainer, self.figures.loss, norm, self.figures.sample_ids)
        if self._logs_now():
            self.log("train/gradient_norm", norm)

    def _logs_now(self) -> bool:
        every = max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        return (self.global_step + 1) % every == 0

    def configure_optimizers(self) -> Any:  # noqa: ANN401 - Lightning's dictionary
        """Make optimizer and schedule."""
        make = self.scheduler_callable or partial(self.schedule, num_steps=self._num_steps)
        rehearse(self.model, self.optimizer_callable, make, self.trainer.estimated_stepping_batches)
        optimizer = make_optimizer(self.model, self.optimizer_callable)
        scheduler = make_scheduler(optimizer, make)
        self._optimizer_options = read_optimizer_options(optimizer, scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def validation_step(self, batch: ResponseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Add a batch's loss; the batch is empty on a process without samples."""
        _require_batch(batch, ResponseBatch)
        corrupted = self.validation.corrupt(batch, self.model.special_tokens)
        self.validation.means.update(None if corrupted is None else self.loss(self._lay_out(corrupted)))

    def configure_callbacks(self) -> list[L.Callback]:
        """Return the callbacks for validation, evaluation, the step source and checkpoints of whole steps.

        Raises:
            ValueError: If a callback of the trainer makes it impossible to resume the run.
        """
        if self.trainer.state.fn == "fit":
            check_callbacks(self.trainer.callbacks)  # type: ignore[attr-defined]
        return [self.validation, self.evaluation, self.step_source, SaveLastStep()]

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Decode a batch with the first decoder, in a test with every decoder; write and return the predictions."""
        return self.evaluation.step(batch)

    test_step = predict_step  # type: ignore[assignment] - Lightning hands the predictions to hooks alone


def _require_batch(batch: object, *types: type) -> None:
    """Refuse batches from other loaders, such as a DataLoader over unencoded texts."""
    expected = "batches of an InstructionDataModule"
    fix = (
        "pass InstructionDataModule(rows, tokenizer) to Trainer.fit, where rows are dicts or a torch data set of dicts"
    )
    require(isinstance(batch, types), "data", expected, type(batch).__name__, fix)
