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
import yaml
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from refusion_lit import decoding, objectives, tasks
from refusion_lit.checkpoints.files import is_checkpoint_file, is_sharded_checkpoint, model_source, read_checkpoint
from refusion_lit.checkpoints.metadata import CheckpointMetadata
from refusion_lit.checkpoints.models import own_draft
from refusion_lit.cli import resume, run_directory, run_loggers
from refusion_lit.cli.parser import (
    PARSER_ERRORS,
    OneLineParser,
    allow_bare_flags,
    explain_error,
    list_config_files,
    locate,
)
from refusion_lit.cli.trainer_progress import TrainerProgress
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.modeling.load import default_device
from refusion_lit.modeling.saving import HAS_DRAFTER
from refusion_lit.modeling.source import ModelSource
from refusion_lit.plugins import load_plugins
from refusion_lit.training.callbacks import AtomicCheckpointIO, SaveOnSignal, ValidateLastStep
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.training.optimizer import is_slow_precision
from refusion_lit.utils.files import read_yaml, require_writable
from refusion_lit.utils.require import require, require_at_least

__all__ = ["RefusionCLI", "decoding", "objectives", "tasks"]  # imported so that short class names resolve

yaml.SafeDumper.add_multi_representer(str, yaml.SafeDumper.represent_str)  # for enums of text, as in Timer


_DESCRIPTIONS = {
    "fit": "Train a model.",
    "validate": "Compute the validation loss of a checkpoint.",
    "test": "Decode a test set with every decoder of the config and print them side by side.",
    "predict": "Write predictions as JSON lines.",
}
_RESUME = (
    " --resume [RUN] continues an interrupted run: a run's directory (with its config), a version of RUN_NAME, or "
    "without RUN the newest run of RUN_NAME, if any exists."
)
_CKPT_PATH = "checkpoint, Hugging Face directory or hub id of the model; last: the newest checkpoint of RUN_NAME"
_FIT_CKPT_PATH = (
    "checkpoint of a training to continue; last: the newest checkpoint of RUN_NAME (and RUN_VERSION), if any exists"
)


class OneLineLightningParser(OneLineParser, LightningArgumentParser):
    """Lightning's parser with single-line errors."""


class RefusionCLI(LightningCLI):
    """LightningCLI with runs in ``runs/NAME/VERSION`` and single-line errors. Checkpoints override no option.

    Attributes:
        claim: The run's directory; ``None`` until a directory is chosen. It is a class attribute: the constructor does
            the whole work, so that there is no instance if it raises.

    Args:
        args: A subcommand and its options.
    """

    _first_steps = (0, 0)  # first step and first validation logged after a resumption
    claim: ClassVar[run_directory.Claim | None] = None

    def __init__(self, args: Sequence[str]) -> None:
        self._args = args
        super().__init__(
            SlotDiffusionModule,
            InstructionDataModule,
            args=list(args),
            save_config_callback=run_directory.SaveRun,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,  # the module has options for optimizer and schedule
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401 - Lightning's signature
        """Return our parser."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={L.__version__}"])
        load_plugins()  # plugins register short names of decoders and objectives
        parser = OneLineLightningParser(**kwargs)
        parser.add_argument(
            "-c", "--config", action="config", help="YAML file; may be repeated: later files override earlier files"
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options for the run's directory, and link the data module's tokenizer to the model."""
        parser.add_argument("--runs_dir", type=str, default="runs", help="directory of all runs")
        parser.add_argument("--run_name", type=str, default="default", help="runs are RUNS_DIR/RUN_NAME/VERSION")
        parser.add_argument("--run_version", type=str | None, default=None, help="counted up by default")
        threads = "CPU threads of torch; OMP_NUM_THREADS overrides a config file"
        parser.add_argument("--num_threads", type=int | None, default=None, help=threads)
        parser.set_defaults({"model.seed": None, "data.seed": None})  # seed_everything; set after parsing
        parser.link_arguments("data.built_tokenizer", "model.tokenizer", apply_on="instantiate")
        parser.link_arguments("data.prompt_template", "model.prompt_template", apply_on="parse")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401 - Lightning's
        """Return the subcommand's parser. Parsers of other subcommands stay empty, because filling a parser is slow."""
        if self._args and self._args[0] != subcommand:
            return self.init_parser(**kwargs)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        allow_bare_flags(parser)
        parser.usage = f"refusion-lit {subcommand} --config FILE [--OPTION VALUE ...]"
        parser.description = _DESCRIPTIONS[subcommand] + _RESUME * (subcommand != "validate")
        for action in parser._actions:
            if action.dest == "ckpt_path":
                action.help = _FIT_CKPT_PATH if subcommand == "fit" else _CKPT_PATH
            elif action.dest == "weights_only":
                action.help = "no effect: checkpoints are always loaded as data only"
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401, ARG002 - Lightning's
        """Parse the arguments into ``self.config``."""
        self.config = self.parse(args)

    def parse(self, args: Sequence[str]) -> Namespace:
        """Parse arguments; ``--model.decoders.NAME`` may be a decoder's YAML file.

        ``seed_everything`` is the default of ``model.seed`` and ``data.seed``.

        Raises:
            ValueError: Naming the wrong option.
        """
        command, *options = args
        subparser = self._subcommand_parsers[command]
        self._named = {arg.partition("=")[0] for arg in options}
        files = {path: read_yaml(path, "config") for path in list_config_files(options)}
        for path, values in files.items():
            _check_groups(subparser, values, path)
        try:
            options_read = _read_decoder_files(options)
            if "--print_config" in self._named:  # only the parser of all subcommands prints the config
                self.parser.parse_args([command, *options_read])
            # The parser of all subcommands would check every value a second time, which takes as long as parsing.
            config = Namespace({"subcommand": command, command: subparser.parse_args(options_read)})
        except PARSER_ERRORS as error:
            message = explain_error(error).removeprefix(f"{command}.")
            raise ValueError(_find_file(message, options, files) + message) from error
        for change in run_directory.find_moved_files(config[command], files):
            sys.stderr.write(f"{change}\n")
        seed = config[command].seed_everything
        if type(seed) is int:
            expected = f"an integer from 0 to {2**32 - 1}"
            require(0 <= seed < 2**32, "seed_everything", expected, seed, "set it in that range")
        for name in ("model.seed", "data.seed"):
            # A run's config names all seeds. --seed_everything on the command line replaces them.
            is_replaced = "--seed_everything" in self._named and f"--{name}" not in self._named
            if config[command][name] is None or is_replaced:
                config[command][name] = seed if type(seed) is int else 0
        return config

    def _parse_ckpt_path(self) -> None:
        """Do nothing, because options stored in a checkpoint must not override the config and the command line."""

    def _add_instantiators(self) -> None:
        """Do nothing. Lightning would copy the config for hyperparameters, which our modules do not save."""

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> L.Trainer:
        """Create the trainer: with our progress bar, the run directory's loggers, and atomic checkpoints."""
        if self.claim is not None:
            config["default_root_dir"] = str(self.claim.directory)  # Lightning writes here without a logger
            if config["logger"] is not False:  # the run's loggers first: trainer.log_dir is the directory of the first
                others = _make_list(config["logger"]) if config["logger"] is not True else []
                config["logger"] = run_loggers.create_loggers(
                    self.claim.directory, self._first_steps, others, writes=self.claim.lock is not None
                )
            else:  # Lightning refuses the monitor, which configs of the package have
                monitors = _make_list(config["callbacks"])
                config["callbacks"] = [item for item in monitors if not isinstance(item, LearningRateMonitor)]
        user_callbacks = _make_list(config["callbacks"])
        if config["enable_progress_bar"] is not False and not _has(user_callbacks, ProgressBar):
            callbacks = [*callbacks, TrainerProgress()]
        if self.subcommand == "fit":
            if config["enable_checkpointing"] is not False and not _has(user_callbacks, ModelCheckpoint):
                # Lightning's default, after each validation, with a last.ckpt.
                callbacks = [*callbacks, ModelCheckpoint(save_last=True)]
            callbacks = [*callbacks, ValidateLastStep()]
        config["enable_model_summary"] = bool(config["enable_model_summary"])
        try:
            trainer = super()._instantiate_trainer(config, callbacks)
        except (TypeError, ValueError) as error:  # Lightning's message names the option and its choices
            raise ValueError(f"trainer: {error}") from error
        for callback in trainer.checkpoint_callbacks:
            # The directory holds this run alone: its last.ckpt is replaced, also after the directory was moved.
            if isinstance(callback, ModelCheckpoint) and self.claim is not None:
                callback._enable_version_counter = False
            if isinstance(callback, ModelCheckpoint) and config["fast_dev_run"]:
                callback.save_last = None  # Lightning saves it at the end all the same, in the working directory
        if trainer.strategy._checkpoint_io is None:  # the user chose no plugin
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def before_instantiate_classes(self) -> None:
        """Choose the run's directory, and take architecture and tokenizer from a given checkpoint."""
        config = self.config[str(self.subcommand)]
        if "verbose" in config:
            config.verbose = False  # we show the figures ourselves
        if "weights_only" in config:
            config.weights_only = True  # our checkpoints hold tensors and plain values only
        self._set_threads(config)
        _check_trainer(config.trainer, str(self.subcommand))
        if "--trainer.precision" not in self._named:
            _choose_precision(config.trainer)
        run_directory.check_run_names(config.run_name, config.run_version)
        if config.get("ckpt_path") == "last":
            path = resume.find_last_checkpoint(config, str(self.subcommand))
            if path is None:
                sys.stderr.write(f"no checkpoint of {config.run_name} yet: training starts at the beginning\n")
            config.ckpt_path = None if path is None else str(path)
            if path is not None and self.subcommand == "fit":
                self._first_steps = resume.check_unfinished(path, config.trainer)
        elif config.get("ckpt_path"):
            config.ckpt_path = model_source(config.ckpt_path)
        self._choose_directory(config)
        source = config.get("ckpt_path")
        if self.subcommand in ("test", "predict", "validate"):
            if source:
                _use_source(config, str(source))
            else:
                _check_backbone(config.model.backbone, self.subcommand)

    def _set_threads(self, config: Namespace) -> None:
        """Set the number of threads from the command line, OMP_NUM_THREADS or the config, in this order.

        On a busy machine, a new training has one thread, unless the command line or the variable sets the number. A
        resumed training keeps its number, because the number changes the rounding.
        """
        is_chosen = "--num_threads" in self._named or "OMP_NUM_THREADS" in os.environ
        if config.num_threads is not None:
            require_at_least("num_threads", config.num_threads, 1)
            if "--num_threads" in self._named or not is_chosen:
                torch.set_num_threads(config.num_threads)
        num_threads = torch.get_num_threads()
        busy = _describe_load() if self.subcommand == "fit" and num_threads > 1 else ""
        if busy and (is_chosen or config.ckpt_path):
            rank_zero_warn(f"num_threads: {busy}. {num_threads} threads may be slower than one; try --num_threads 1.")
        elif busy:
            rank_zero_warn(f"num_threads: {busy}, so training has one thread; --num_threads {num_threads} keeps all.")
            torch.set_num_threads(1)
            config.num_threads = 1

    def _choose_directory(self, config: Namespace) -> None:
        """Choose and lock the run's directory; refuse a directory with results of another run.

        Raises:
            ValueError: If the directory holds results that the run does not continue, or cannot be written.
        """
        folder = Path(config.runs_dir) / config.run_name
        directory = folder / (config.run_version or run_directory.next_version(folder))
        is_continued = self.subcommand == "fit" and run_directory.continues(config, directory)
        resumes = {"checkpoints": is_continued}
        resumes["predictions"] = is_continued or (self.subcommand in ("test", "predict") and config.model.resume)
        for results, pattern in (("checkpoints", "*.ckpt"), ("predictions", "predictions*.jsonl")):
            is_free = resumes[results] or not any(directory.rglob(pattern))
            can_resume = self.subcommand != "validate" and (results == "checkpoints") == (self.subcommand == "fit")
            fix = "add --resume to continue it, or choose another name" if can_resume else "choose another name"
            require(is_free, "run_version", "a new run", f"{directory}, which holds {results}", fix)
        if not is_continued:
            self._first_steps = (0, 0)
        if self.subcommand == "fit":
            for folder in (directory / "checkpoints", *resume.list_dirpaths(config.trainer.callbacks)):
                require_writable(folder, "runs_dir" if folder.parent == directory else "trainer.callbacks.dirpath")
        RefusionCLI.claim = run_directory.Claim(directory)

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
            components |= {f"model.decoders.{name}": decoder for name, decoder in (config.model.decoders or {}).items()}
            raise locate(error, components) from error
        if self.subcommand == "fit":  # Lightning's constructor would refuse it with enable_checkpointing: false
            self.trainer.callbacks.append(SaveOnSignal())  # type: ignore[attr-defined]
        objective = self.model.objective
        if isinstance(self.datamodule, InstructionDataModule) and self.datamodule.pack_length is not None:
            expected = "an objective whose samples can be packed"
            require(objective.packs, "data.pack_length", expected, type(objective).__name__, "set it to null")


def _check_groups(parser: LightningArgumentParser, values: Mapping[str, Any], path: Path) -> None:
    """Refuse ``model: 3`` in a config: jsonargparse ignores a value where a group of options belongs."""
    for name in parser.groups or ():
        value: Any = values
        for part in name.split("."):
            value = value.get(part, {}) if isinstance(value, Mapping) else {}
        is_file = isinstance(value, str)
        require(
            is_file or isinstance(value, Mapping), f"{path}: {name}", "a mapping or a YAML file", value, "correct it"
        )


def _find_file(message: str, args: Sequence[str], files: dict[Path, dict[str, Any]]) -> str:
    """Return ``FILE: `` for the last config that sets an error's option; an empty text if the command line does."""
    option = re.sub(r"unknown option '(.+?)'", r"\1:", message).partition(":")[0]
    given = [arg.partition("=")[0].replace(".init_args", "") for arg in args]
    if any(f"--{option}.".startswith(f"{name}.") or name.startswith(f"--{option}.") for name in given):
        return ""
    return next((f"{path}: " for path in reversed(files) if _has_option(files[path], option)), "")


def _has_option(values: Mapping[str, Any], option: str) -> bool:
    """Return whether a config sets an option, or the component to which the option belongs."""
    value: Any = values
    for part in () if option in values else option.split("."):
        if isinstance(value, Mapping) and part not in value:
            value = value.get("init_args") or {}
        if not isinstance(value, Mapping):
            break
        if part not in value:
            return False
        value = value[part]
    return True


def _read_decoder_files(args: Sequence[str]) -> list[str]:
    """Replace ``--model.decoders.NAME FILE`` by the file's content.

    jsonargparse reads a file for an option, but not for an entry of a mapping.

    Raises:
        ValueError: If a file holds no decoder.
    """
    expanded: list[str] = []
    arguments = iter(args)
    for argument in arguments:
        option, has_value, value = argument.partition("=")
        if re.fullmatch(r"--model\.decoders\.[^.]+", option):
            value = value if has_value else next(arguments, "")
            if value.endswith((".yaml", ".yml")):
                values = read_yaml(Path(value), option.removeprefix("--"))
                expected = f"a component (class_path and init_args) in {value}"
                fix = "add class_path"
                require("class_path" in values, option.removeprefix("--"), expected, ", ".join(values), fix)
                value = json.dumps(values)
            argument = f"{option}={value}"
        expanded.append(argument)
    return expanded


def _check_trainer(trainer: Namespace, subcommand: str) -> None:
    """Refuse a missing device, limits of zero batches, and numbers that Lightning divides by or silently ignores."""
    name = str(trainer.accelerator)
    # gpu stands for two kinds of devices. auto, and accelerators given as objects, are not in the registry.
    kinds = [kind for kind in {"gpu": ("cuda", "mps")}.get(name, (name,)) if kind in AcceleratorRegistry]
    is_there = not kinds or any(AcceleratorRegistry[kind]["accelerator"].is_available() for kind in kinds)
    fix = "set it to auto or cpu, or install a torch that sees the device"
    require(is_there, "trainer.accelerator", "a device that this machine has", trainer.accelerator, fix)
    expected = "a strategy that forks processes or starts commands, as the command's parser cannot be sent to others"
    is_sent = "spawn" in str(trainer.strategy)
    require(not is_sent, "trainer.strategy", expected, trainer.strategy, "set it to ddp or ddp_fork")
    for option in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        if trainer[option] is not None:
            require_at_least(f"trainer.{option}", trainer[option], 1)
    limit = trainer.gradient_clip_val
    fix = "set it to null for no clipping"
    require(limit is None or limit > 0, "trainer.gradient_clip_val", "a number above 0, or null", limit, fix)
    interval = trainer.val_check_interval
    expected = "a number of batches of at least 1, a fraction of an epoch above 0, or a time"
    is_positive = not isinstance(interval, int | float) or interval > 0
    require(is_positive, "trainer.val_check_interval", expected, interval, "leave it out for once an epoch")
    split = {"fit": "train", "validate": "val"}.get(subcommand, subcommand)
    option = f"limit_{split}_batches"
    require(trainer.get(option) != 0, f"trainer.{option}", "some batches", 0, "leave it out for all")
    for option in ("max_steps", "max_epochs") if subcommand == "fit" else ():
        require(trainer[option] != 0, f"trainer.{option}", "at least 1, or -1 for no limit", 0, "raise it")


def _choose_precision(trainer: Namespace) -> None:
    """Replace a 16-bit precision of a config file by 32-true where the processor has no instructions for it.

    Config files are recipes for several machines. A precision on the command line stays.
    """
    uses_cpu = trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and default_device() == "cpu")
    if uses_cpu and is_slow_precision(str(trainer.precision), torch.device("cpu")):
        text = f"trainer.precision: 32-true, as this processor has no instructions for {trainer.precision}"
        sys.stderr.write(f"{text}; give --trainer.precision={trainer.precision} to keep it\n")
        trainer.precision = "32-true"


def _use_source(config: Namespace, source: str) -> None:
    """Take architecture and tokenizer from a checkpoint or directory; all other options stay.

    A checkpoint stays in ``config.ckpt_path``, from which Lightning loads the weights. A directory moves to the
    backbone's source, and ``config.ckpt_path`` becomes ``None``.

    Raises:
        ValueError: If the source cannot be read, in general or with the config's strategy.
    """
    backbone = config.model.backbone
    if is_checkpoint_file(source):
        strategy = str(getattr(config.trainer.strategy, "class_path", config.trainer.strategy))
        reads_shards = strategy.endswith("ModelParallelStrategy")
        fix = "turn the checkpoint into a directory with `refusion-lit export`, or test with that strategy"
        expected = "the strategy ModelParallelStrategy for a sharded checkpoint"
        require(reads_shards or not is_sharded_checkpoint(source), "trainer.strategy", expected, strategy, fix)
        metadata = CheckpointMetadata.from_checkpoint(read_checkpoint(source, mmap=True), source)
        config.data.tokenizer = Namespace(
            class_path="refusion_lit.data.tokenizers.StoredTokenizer",
            init_args=Namespace(files=metadata.tokenizer_files),
        )
        _use_template(config, metadata.prompt_template)
        stored = metadata.backbone_config()
        # The module merges adapters when it loads a checkpoint, except sharded checkpoints, which load in place.
        parts = {"lora": stored.lora if is_sharded_checkpoint(source) else None, "drafter": stored.drafter}
        parts["block_drafter"] = stored.block_drafter
        parts = {name: part and Namespace(**asdict(part)) for name, part in parts.items()}
        parts |= dict.fromkeys(("source", "draft", "attention", "block_size"))
        backbone.update(Namespace(config=stored.config, **parts))
        return
    names = ("revision", "checkpoint_format", "trust_remote_code")
    config.data.tokenizer = Namespace(
        class_path="refusion_lit.data.tokenizers.PretrainedTokenizer",
        init_args=Namespace(source=source, **{name: backbone[name] for name in names}),
    )
    backbone.update(Namespace(source=source, config={}, lora=None, drafter=None, block_drafter=None))
    options = {"revision": backbone.revision, "checkpoint_format": backbone.checkpoint_format}
    model = ModelSource.open(source, option="ckpt_path", **options)
    _use_template(config, model.prompt_template)
    if backbone.draft is None and model.entry.get(HAS_DRAFTER):
        backbone.draft = own_draft(source, backbone.revision, model.entry)
    config.ckpt_path = None  # Lightning reads checkpoints only; the backbone loads the directory


def _describe_load() -> str:
    """Describe the machine's load if other programs use the processors; else return an empty text.

    Threads wait for one another several times per layer. If one thread loses its processor, all threads stop.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    num_cpus = os.cpu_count() or 1
    is_busy = load > 1.25 * num_cpus  # a run of ours that has just ended leaves a load of num_cpus
    return f"this machine is busy (a load of {load:.1f} on {num_cpus} processors)" if is_busy else ""


def _use_template(config: Namespace, template: str) -> None:
    """Use the model's prompt template unless the options have a prompt template."""
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
        rank_zero_warn(
            "ckpt_path: none given, so the model has random weights; give --ckpt_path to load trained weights"
        )


def _make_list(value: Any) -> list[Any]:  # noqa: ANN401 - loggers or callbacks
    """Return the values in a Trainer option that takes an object, a list or null."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _has(callbacks: list[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


class _ParseOnly(RefusionCLI):
    """Creates the parsers, without parsing, seeding or building anything."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401, ARG002
        self.config = Namespace(subcommand=None)

    def _set_seed(self) -> None: ...

    before_instantiate_classes = instantiate_classes = _set_seed


def parse_only(*subcommand: str) -> RefusionCLI:
    """Return a command line with the parsers of all Trainer subcommands, or of one subcommand, and without objects."""
    return _ParseOnly(subcommand)


def build_parsers() -> dict[str, LightningArgumentParser]:
    """Return the parsers of ``fit``, ``validate``, ``test`` and ``predict`` by name."""
    return parse_only()._subcommand_parsers
