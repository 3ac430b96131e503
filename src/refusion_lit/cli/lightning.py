"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI over the module and the data module."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from refusion_lit import decoding, objectives, tasks
from refusion_lit.checkpoints.files import is_checkpoint_file, is_sharded_checkpoint, model_source, read_checkpoint
from refusion_lit.checkpoints.metadata import CheckpointMetadata
from refusion_lit.checkpoints.models import own_draft
from refusion_lit.cli import resume, run_directory
from refusion_lit.cli.given import PARSER_ERRORS, Given, is_yaml_file, options_given
from refusion_lit.cli.parser import OneLineParser, let_booleans_alone
from refusion_lit.cli.progress_bar import RunProgress
from refusion_lit.cli.usage_errors import explained, located
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.modeling.saving import HAS_DRAFTER
from refusion_lit.modeling.source import ModelSource
from refusion_lit.plugins import load_plugins
from refusion_lit.training.callbacks import AtomicCheckpointIO, SaveLastStep, SaveOnSignal
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.utils.files import read_yaml
from refusion_lit.utils.require import require, require_at_least

__all__ = ["RefusionCLI", "decoding", "objectives", "tasks"]  # imported so that short class names resolve


class OneLineLightningParser(OneLineParser, LightningArgumentParser):
    """Lightning's parser with errors of one line."""


class RefusionCLI(LightningCLI):
    """LightningCLI with runs in ``runs/NAME/VERSION``, one-line errors, and checkpoints that override no option.

    Attributes:
        run_directory: Where this process's run lands, as soon as it is chosen; ``None`` with loggers of the user's own.
            It belongs to the class, as the constructor does the whole work and may raise.
        claim: The right to write that directory; ``None`` on processes that do not write to it.

    Args:
        args: A subcommand and its options.
    """

    run_directory: ClassVar[Path | None] = None
    _first_step = 0  # that is logged, of a resumed training
    claim: ClassVar[run_directory.Claim | None] = None

    def __init__(self, args: Sequence[str]) -> None:
        self._given = args
        super().__init__(
            SlotDiffusionModule,
            InstructionDataModule,
            args=list(args),
            save_config_callback=run_directory.SaveRun,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,  # model.optimizer and model.lr_scheduler spare norms and biases
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401 - Lightning's signature
        """Return our parser."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={L.__version__}"])
        load_plugins()  # their decoders and objectives have short names
        parser = OneLineLightningParser(**kwargs)
        parser.add_argument("-c", "--config", action="config", help="YAML file; several overlay one another")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add where runs land, and give the model the data module's tokenizer."""
        parser.add_argument("--runs_dir", type=str, default="runs", help="directory of all runs")
        parser.add_argument("--run_name", type=str, default="default", help="a run lands in RUNS_DIR/RUN_NAME/VERSION")
        parser.add_argument("--run_version", type=str | None, default=None, help="counted up by default")
        threads = "CPU threads of torch; a config's yield to OMP_NUM_THREADS"
        parser.add_argument("--num_threads", type=int | None, default=None, help=threads)
        parser.link_arguments("data.built_tokenizer", "model.tokenizer", apply_on="instantiate")
        parser.link_arguments("data.prompt_template", "model.prompt_template", apply_on="parse")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401 - Lightning's
        """Return a subcommand's parser; those of others than the given one stay empty, as filling one takes long."""
        if self._given and self._given[0] != subcommand:
            return self.init_parser(**kwargs)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        let_booleans_alone(parser)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401 - Lightning's
        """Parse into ``config``."""
        self.config = self.parse(parser, args)

    def parse(self, parser: LightningArgumentParser, args: Sequence[str]) -> Namespace:
        """Parse arguments; ``--model.decoders.NAME`` may be the YAML file of a decoder.

        ``seed_everything`` is the default of ``model.seed`` and ``data.seed``.

        Raises:
            ValueError: Naming the wrong option.
        """
        command, *options = args
        own = self._subcommand_parsers[command]
        given = options_given(options)
        self._names_threads = any(each.name == "num_threads" and not each.file for each in given)
        _check_groups(own, given)
        options = _with_decoder_files(options, given)
        try:
            config = parser.parse_args([command, *options])
        except PARSER_ERRORS as error:
            raise explained(own, options, error, command) from error
        seed = config[command].seed_everything
        if type(seed) is int:
            expected = f"an integer from 0 to {2**32 - 1}"
            require(0 <= seed < 2**32, "seed_everything", expected, seed, "set it in that range")
            # On the command line it goes before the seeds of a file, such as a run's config, which names all options.
            is_own = any(each.name == "seed_everything" and not each.file for each in given)
            for name in {"model.seed", "data.seed"} - {each.name for each in given if not (is_own and each.file)}:
                config[command][name] = seed
        return config

    def _parse_ckpt_path(self) -> None:
        """Do nothing: what a checkpoint stores must not override the config and the command line."""

    def _add_instantiators(self) -> None:
        """Do nothing: Lightning's write the whole config out for hyperparameters, which ours do not save."""

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> L.Trainer:
        """Create the trainer: with our progress bar, loggers of the run's directory, and atomic checkpoints."""
        if self.run_directory is not None:
            config["default_root_dir"] = str(self.run_directory)  # where results land without a logger
            if config["logger"] is not False:
                config["logger"] = run_directory.loggers(self.run_directory, self._first_step, self.claim)
        own = config["callbacks"] or []
        own = own if isinstance(own, list) else [own]
        if config["enable_progress_bar"] is not False and not any(isinstance(each, ProgressBar) for each in own):
            callbacks = [*callbacks, RunProgress()]
        if self.subcommand == "fit" and config["enable_checkpointing"] is not False:
            if not any(isinstance(each, ModelCheckpoint) for each in own):
                # Lightning's default, after each validation, with a last.ckpt.
                callbacks = [*callbacks, ModelCheckpoint(save_last=True)]
            callbacks = [*callbacks, SaveLastStep()]
        if self.subcommand == "fit":
            callbacks = [*callbacks, SaveOnSignal()]
        config["enable_model_summary"] = bool(config["enable_model_summary"])
        try:
            trainer = super()._instantiate_trainer(config, callbacks)
        except (TypeError, ValueError) as error:  # which name the option and its choices
            raise ValueError(f"trainer: {error}") from error
        for callback in trainer.checkpoint_callbacks:
            # The directory holds this run alone: its last.ckpt is replaced, also after the directory was moved.
            if isinstance(callback, ModelCheckpoint) and self.run_directory is not None:
                callback._enable_version_counter = False
            if isinstance(callback, ModelCheckpoint) and config["fast_dev_run"]:
                callback.save_last = None  # Lightning saves it at the end all the same, in the working directory
        if trainer.strategy._checkpoint_io is None:  # none that the user chose
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def before_instantiate_classes(self) -> None:
        """Choose the run's directory, and take architecture and tokenizer from a given checkpoint."""
        config = self.config[str(self.subcommand)]
        if "verbose" in config:
            config.verbose = False  # we show the figures ourselves
        if "weights_only" in config:
            config.weights_only = True  # our checkpoints hold tensors and plain values only
        if config.num_threads is not None:
            require_at_least("num_threads", config.num_threads, 1)
            if self._names_threads or "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(config.num_threads)
        _check_trainer(config.trainer)
        limit = {"validate": "limit_val_batches"}.get(str(self.subcommand), f"limit_{self.subcommand}_batches")
        has_batches = config.trainer.get(limit) != 0  # a fit has another limit, and says so if no step is done
        require(has_batches, f"trainer.{limit}", "some batches", 0, "leave it out for all")
        run_directory.check_names(config.run_name, config.run_version)
        if config.get("ckpt_path") == "last":
            path = resume.last_checkpoint(config, str(self.subcommand))
            if path is None:
                sys.stderr.write(f"no checkpoint of {config.run_name} yet: training starts at the beginning\n")
            config.ckpt_path = None if path is None else str(path)
            if path is not None and self.subcommand == "fit":
                self._first_step = resume.check_unfinished(path, config.trainer)
        elif config.get("ckpt_path"):
            config.ckpt_path = model_source(config.ckpt_path)
        self._choose_directory(config)
        source = config.get("ckpt_path")
        if self.subcommand in ("test", "predict", "validate"):
            if source:
                _use_source(config, str(source))
            else:
                _check_backbone(config.model.backbone, self.subcommand)

    def _choose_directory(self, config: Namespace) -> None:
        if config.trainer.logger not in (None, True, False):
            return
        folder = Path(config.runs_dir) / config.run_name
        directory = folder / (config.run_version or run_directory.next_version(folder))
        goes_on = self.subcommand == "fit" and run_directory.continues(config, directory)
        resumes = {"checkpoints": goes_on}
        resumes["predictions"] = goes_on or (self.subcommand in ("test", "predict") and config.model.resume)
        for results, pattern in (("checkpoints", "*.ckpt"), ("predictions", "predictions*.jsonl")):
            holds = resumes[results] or not any(directory.rglob(pattern))
            is_own = self.subcommand != "validate" and (results == "checkpoints") == (self.subcommand == "fit")
            fix = "add --resume to continue it, or choose another name" if is_own else "choose another name"
            require(holds, "run_version", "a new run", f"{directory}, which holds {results}", fix)
        if not goes_on:
            self._first_step = 0
        RefusionCLI.claim = run_directory.claim(directory)
        RefusionCLI.run_directory = directory

    def instantiate_classes(self) -> None:
        """Create trainer, model and data.

        Raises:
            ValueError: If an option is wrong, in one line.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            config = self.config[str(self.subcommand)]
            components = {"model.objective": config.model.objective}
            components |= {f"model.decoders.{name}": each for name, each in (config.model.decoders or {}).items()}
            raise ValueError(located(error, components)) from error
        objective = self.model.objective
        if isinstance(self.datamodule, InstructionDataModule) and self.datamodule.pack_length is not None:
            expected = "an objective whose samples can be packed"
            require(objective.packs, "data.pack_length", expected, type(objective).__name__, "set it to null")


def _check_groups(parser: LightningArgumentParser, given: Sequence[Given]) -> None:
    """Refuse values in place of a group of options, which jsonargparse drops."""
    groups = {action.dest for action in parser._actions if type(action).__name__ == "_ActionConfigLoad"}
    for each in given:
        is_file = isinstance(each.value, str) and (bool(each.file) or Path(each.value).is_file())
        holds = each.name not in groups or isinstance(each.value, Mapping) or is_file
        require(holds, each.where + each.name, "a mapping or a YAML file", each.value, "write a mapping below it")


def _with_decoder_files(args: Sequence[str], given: Sequence[Given]) -> list[str]:
    """Replace the files of decoders by their content; jsonargparse reads files of options, not of values of a mapping.

    Raises:
        ValueError: If a file holds no decoder.
    """
    expanded = list(args)
    for each in given:
        file = each.value
        if each.file or not re.fullmatch(r"model\.decoders\.[^.]+", each.name) or not is_yaml_file(file):
            continue
        values = read_yaml(Path(file), each.name)
        expected = f"a component (class_path and init_args) in {file}"
        require("class_path" in values, each.name, expected, ", ".join(values), "add class_path")
        content = json.dumps(values)
        option = f"--{each.name}"
        expanded = [{file: content, f"{option}={file}": f"{option}={content}"}.get(arg, arg) for arg in expanded]
    return expanded


def _check_trainer(trainer: Namespace) -> None:
    """Refuse a device that is missing, and options that Lightning divides by or ignores."""
    name = str(trainer.accelerator)
    kinds = [kind for kind in {"gpu": ("cuda", "mps")}.get(name, (name,)) if kind in AcceleratorRegistry]
    is_there = not kinds or any(AcceleratorRegistry[kind]["accelerator"].is_available() for kind in kinds)
    fix = "set it to auto or cpu, or install a torch that sees the device"
    require(is_there, "trainer.accelerator", "a device that this machine has", trainer.accelerator, fix)
    for option in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        if trainer[option] is not None:
            require_at_least(f"trainer.{option}", trainer[option], 1)
    limit = trainer.gradient_clip_val
    fix = "set it to null for no clipping"
    require(limit is None or limit > 0, "trainer.gradient_clip_val", "a number above 0, or null", limit, fix)
    interval = trainer.val_check_interval
    expected = "a number of batches of at least 1, a fraction of an epoch above 0, or a time"
    holds = not isinstance(interval, int | float) or interval > 0
    require(holds, "trainer.val_check_interval", expected, interval, "leave it out for once an epoch")


def _use_source(config: Namespace, source: str) -> None:
    """Let a checkpoint or directory decide what the model is; all other options stay as given.

    Raises:
        ValueError: If it cannot be read, or not with the strategy of the config.
    """
    backbone = config.model.backbone
    if is_checkpoint_file(source):
        strategy = str(getattr(config.trainer.strategy, "class_path", config.trainer.strategy))
        reads_shards = strategy.endswith("ModelParallelStrategy")
        fix = "turn the checkpoint into a directory with `refusion-lit export`, or test with that strategy"
        expected = "the strategy ModelParallelStrategy for a sharded checkpoint"
        require(reads_shards or not is_sharded_checkpoint(source), "trainer.strategy", expected, strategy, fix)
        metadata = CheckpointMetadata.from_checkpoint(read_checkpoint(source), source)
        config.data.tokenizer = Namespace(
            class_path="refusion_lit.data.tokenizers.StoredTokenizer",
            init_args=Namespace(files=metadata.tokenizer_files),
        )
        _use_template(config, metadata.prompt_template)
        stored = metadata.backbone_config()
        # The module merges adapters when it loads a checkpoint; a sharded one is loaded in place, so it cannot.
        parts = {"lora": stored.lora if is_sharded_checkpoint(source) else None, "drafter": stored.drafter}
        own = {name: part and Namespace(**asdict(part)) for name, part in parts.items()}
        backbone.update(Namespace(source=None, config=stored.config, draft=None, **own))
        return
    names = ("revision", "checkpoint_format", "trust_remote_code")
    config.data.tokenizer = Namespace(
        class_path="refusion_lit.data.tokenizers.PretrainedTokenizer",
        init_args=Namespace(source=source, **{name: backbone[name] for name in names}),
    )
    backbone.update(Namespace(source=source, config={}, lora=None, drafter=None))
    options = {"revision": backbone.revision, "checkpoint_format": backbone.checkpoint_format}
    stored = ModelSource.open(source, option="ckpt_path", **options).entry
    _use_template(config, stored.get("prompt_template", "{query}"))
    if backbone.draft is None and stored.get(HAS_DRAFTER):
        backbone.draft = own_draft(source, backbone.revision)
    config.ckpt_path = None


def _use_template(config: Namespace, template: str) -> None:
    """Let a model's own prompt template stand for one that is not given."""
    if config.data.prompt_template is None:
        config.data.prompt_template = config.model.prompt_template = template


def _check_backbone(backbone: Namespace, command: str) -> None:
    """Refuse a command without any model, and warn about random weights.

    Raises:
        ValueError: If there is neither a checkpoint nor a model in the config.
    """
    if backbone.source is None and "model_type" not in backbone.config:
        raise ValueError(
            f"ckpt_path: expected a checkpoint, a Hugging Face directory or a hub id to {command}, got none, and the "
            "config names no model.backbone either; give --ckpt_path."
        )
    if backbone.source is None:
        rank_zero_warn("ckpt_path: none given, so that the model has random weights; give --ckpt_path to use others")


class _ParseOnly(RefusionCLI):
    """Makes the parsers, and parses, seeds and builds nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401, ARG002
        self.config = Namespace(subcommand=None)

    def _set_seed(self) -> None: ...

    before_instantiate_classes = instantiate_classes = _set_seed


def parse_only(*subcommand: str) -> RefusionCLI:
    """Return the command line of the Trainer's subcommands, or of one, which has parsed and built nothing."""
    return _ParseOnly(subcommand)
