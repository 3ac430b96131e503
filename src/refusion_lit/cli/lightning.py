"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI over the module and the data module."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from refusion_lit import decoding, objectives, tasks
from refusion_lit.checkpoints.atomic import AtomicCheckpointIO
from refusion_lit.checkpoints.metadata import CheckpointMetadata
from refusion_lit.checkpoints.sharded import is_sharded_checkpoint
from refusion_lit.checkpoints.stored import is_checkpoint_file, newest_checkpoint, read_checkpoint
from refusion_lit.cli.check import explain
from refusion_lit.cli.parser import PARSER_ERRORS, OneLineErrors
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.reports.environment import write_environment
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.training.signals import SaveOnSignal
from refusion_lit.utils.yaml_files import read_yaml

__all__ = ["RefusionCLI", "decoding", "objectives", "run", "tasks"]  # imported so that short class names resolve


# True, but nothing a user could act on.
_EXPECTED = (
    "Experiment logs directory .* exists and is not empty",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "The dirpath has changed from",
    "Checkpoint directory .* exists and is not empty",
    "The .* does not have many workers",
    "The number of training batches",
    "Trying to infer the `batch_size`",
    "It is recommended to use .*sync_dist",  # our metrics are summed over processes already
)


# Callbacks of the training, which only a training goes on with.
_EXPECTED_WITHOUT_TRAINING = ("Be aware that when using `ckpt_path`, callbacks used to create",)


_HOW_TO_GO_ON = (
    "finished batches are on disk, go on with the same command and --run_version VERSION --model.resume true "
    "(fit: --ckpt_path last)"
)


_CKPT_PATH = {
    "fit": "checkpoint of a training to go on with; last: the newest one of RUN_NAME (and RUN_VERSION), or a new start",
    "others": "checkpoint, Hugging Face directory or hub id, which brings the model; last: the newest one of RUN_NAME",
}


class OneLineLightningParser(OneLineErrors, LightningArgumentParser):
    """Lightning's parser with errors of one line."""


class SaveRun(SaveConfigCallback):
    """Saves the resolved config and the environment into the run's directory."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note the run's directory on all processes: asking for it waits for all of them."""
        self._directory = Path(trainer.log_dir or trainer.default_root_dir)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Write ``environment.json`` beside the config; called on the first process alone."""
        write_environment(self._directory, self.config.get("seed_everything"))


class RefusionCLI(LightningCLI):
    """LightningCLI with runs in ``runs/NAME/VERSION``, one-line errors, and checkpoints that override no option."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401 - Lightning's signature
        """Return our parser."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={L.__version__}"])
        parser = OneLineLightningParser(**kwargs)
        parser.add_argument("-c", "--config", action="config", help="YAML file; several overlay one another")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add where runs land, and give the model the data module's tokenizer."""
        parser.add_argument("--runs_dir", type=str, default="runs", help="directory of all runs")
        parser.add_argument("--run_name", type=str, default="default", help="a run lands in RUNS_DIR/RUN_NAME/VERSION")
        parser.add_argument("--run_version", type=str | None, default=None, help="counted up by default")
        parser.add_argument("--num_threads", type=int | None, default=None, help="CPU threads of torch")
        parser.link_arguments("data.built_tokenizer", "model.tokenizer", apply_on="instantiate")
        parser.link_arguments("data.prompt_template", "model.prompt_template", apply_on="parse")

    @property
    def parsers(self) -> dict[str, LightningArgumentParser]:
        """The parsers of the subcommands by name."""
        return getattr(self, "_subcommand_parsers", {})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401 - Lightning's
        """Return a subcommand's parser, with help that says what these options do here."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.usage = f"refusion-lit {subcommand} --config FILE [--OPTION VALUE ...]"
        for action in parser._actions:
            if action.dest == "ckpt_path":
                action.help = _CKPT_PATH["fit" if subcommand == "fit" else "others"]
            elif action.dest == "weights_only":
                action.help = "without effect: checkpoints are loaded as data, whatever it says"
            elif action.dest.split(".")[0] in ("optimizer", "lr_scheduler"):
                action.help = SUPPRESS  # Lightning's own; model.optimizer and model.lr_scheduler spare norms and biases
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401 - Lightning's
        """Parse into ``config``."""
        self.config = self.parse(parser, args)

    def parse(self, parser: LightningArgumentParser, args: Sequence[str]) -> Namespace:
        """Parse arguments, in which a decoder may be given by its file.

        Raises:
            ValueError: Naming the wrong option.
        """
        given = with_component_files(args, "model.decoders")
        try:
            return parser.parse_args(given)
        except PARSER_ERRORS as error:
            command = given[0] if given and given[0] in self.parsers else ""
            own = (self.parsers[command], given[1:]) if command else (parser, given)
            raise explain(*own, error, command) from error

    def _parse_ckpt_path(self) -> None:
        """Do nothing: what a checkpoint stores must not override the config and the command line."""

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> L.Trainer:
        """Make the trainer, with checkpoints written whole or not at all, also when a signal ends the training."""
        trainer = super()._instantiate_trainer(config, [*callbacks, SaveOnSignal()])
        if trainer.strategy._checkpoint_io is None:  # none that the user chose
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def before_instantiate_classes(self) -> None:
        """Choose the run's directory, and take architecture and tokenizer from a given checkpoint."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        if self.subcommand == "test":
            config.verbose = False  # our table says it, and more
        if "weights_only" in config:
            config.weights_only = True  # our checkpoints need no more
        if config.num_threads is not None:
            if config.num_threads < 1:
                raise ValueError(f"num_threads: expected an integer of at least 1, got {config.num_threads}; raise it.")
            torch.set_num_threads(config.num_threads)
        if config.get("ckpt_path") == "last":
            config.ckpt_path = self._last(config)
        if config.trainer.logger in (None, True):
            version = config.run_version
            folder = Path(config.runs_dir) / config.run_name
            if version is None:
                version = _next_version(folder)
            _prepare_directory(folder / version)
            shared = {"save_dir": config.runs_dir, "name": config.run_name, "version": version}
            flushed = {**shared, "flush_logs_every_n_steps": 1}  # so that a killed run leaves its losses
            config.trainer.logger = [
                Namespace(class_path=f"{cls.__module__}.{cls.__name__}", init_args=Namespace(**options))
                for cls, options in ((TensorBoardLogger, shared), (CSVLogger, flushed))
            ]
        source = config.get("ckpt_path")
        if self.subcommand in ("test", "predict", "validate"):
            if source:
                self._use_source(config, str(source))
            else:
                _check_backbone(config.model.backbone, self.subcommand)

    def _last(self, config: Namespace) -> str | None:
        """Return the newest checkpoint of the run's name, or of its version where one is named."""
        folder = Path(config.runs_dir) / config.run_name
        named = folder / config.run_version if config.run_version else folder
        folders = [named if any(named.rglob("*.ckpt")) else folder]
        for callback in config.trainer.callbacks or []:
            dirpath = callback.get("init_args", Namespace()).get("dirpath")
            folders += [Path(dirpath)] if dirpath else []
        path = newest_checkpoint(folders)
        if path is not None:
            return str(path)
        if self.subcommand != "fit":
            raise ValueError(f"ckpt_path: expected a checkpoint for 'last' in {folder}, found none; give its path.")
        sys.stderr.write(f"ckpt_path: no checkpoint in {folder} yet, training starts at the beginning\n")
        return None

    def _use_source(self, config: Namespace, source: str) -> None:
        """Let a checkpoint decide what model it is; everything else stays with config and command line."""
        if is_checkpoint_file(source):
            _check_sharding(config, source)
            metadata = CheckpointMetadata.from_checkpoint(read_checkpoint(source), source)
            config.data.tokenizer = Namespace(
                class_path="refusion_lit.data.tokenizers.StoredTokenizer",
                init_args=Namespace(files=metadata.tokenizer_files),
            )
            stored = metadata.backbone_config()
            config.model.backbone.source = None
            config.model.backbone.config = stored.config
            # The module merges adapters when it loads a checkpoint; a sharded one is loaded in place, so it cannot.
            lora = stored.lora if is_sharded_checkpoint(source) else None
            config.model.backbone.lora = None if lora is None else Namespace(**asdict(lora))
            return
        if source == "best":
            raise ValueError(
                "ckpt_path: expected a path or 'last', got 'best', which only a training knows; give a path."
            )
        if source == "hpc":
            return
        config.data.tokenizer = Namespace(
            class_path="refusion_lit.data.tokenizers.PretrainedTokenizer",
            init_args=Namespace(source=source, revision=None, trust_remote_code=False),
        )
        config.model.backbone.source = source
        config.model.backbone.config = {}
        config.model.backbone.random_init = False
        config.model.backbone.lora = None
        config.ckpt_path = None


def _check_backbone(backbone: Namespace, command: str) -> None:
    """Refuse to go on without any model, and say so where its weights are random."""
    if backbone.source is None and "model_type" not in backbone.config:
        raise ValueError(
            f"ckpt_path: expected a checkpoint, a Hugging Face directory or a hub id to {command}, got none, and the "
            "config names no model.backbone either; give --ckpt_path."
        )
    if backbone.source is None or backbone.random_init:
        rank_zero_warn("ckpt_path: none given, so that the model has random weights; give --ckpt_path to use others")


def _check_sharding(config: Namespace, source: str) -> None:
    """Refuse a sharded checkpoint where the strategy cannot read one."""
    strategy = str(getattr(config.trainer.strategy, "class_path", config.trainer.strategy))
    if is_sharded_checkpoint(source) and not strategy.endswith("ModelParallelStrategy"):
        raise ValueError(
            f"ckpt_path: {source} is a sharded checkpoint, which the strategy {strategy} cannot read. Turn it into a "
            "directory with `refusion-lit export`, or test with the strategy ModelParallelStrategy."
        )


class _ParseOnly(RefusionCLI):
    """Makes the parsers, and parses, seeds and builds nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401, ARG002
        self.config = Namespace(subcommand=None)

    def _set_seed(self) -> None: ...

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...


def parse_only() -> RefusionCLI:
    """Return the command line of the Trainer's subcommands, which has parsed and built nothing."""
    return _ParseOnly(SlotDiffusionModule, InstructionDataModule, args=[], seed_everything_default=0)


def with_component_files(args: Sequence[str], group: str) -> list[str]:
    """Replace ``--GROUP.NAME FILE.yaml`` by the file's content, which jsonargparse does for options but not in dicts.

    Args:
        args: Arguments of a command.
        group: Option whose value is a dict of components, such as ``model.decoders``.

    Returns:
        The arguments, with JSON in place of the files.

    Raises:
        ValueError: If a file is missing or holds no component.
    """
    expanded, rest = [], list(args)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        is_component = name.startswith(f"--{group}.") and name.count(".") == group.count(".") + 1
        if is_component and not equals and rest:
            equals, value = "=", rest.pop(0)
        if is_component and value.endswith((".yaml", ".yml")):
            value = json.dumps(_read_component(Path(value), name))
        expanded.append(f"{name}{equals}{value}")
    return expanded


def _read_component(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{name}: expected the YAML file of a component, got {path}, which does not exist.")
    values = read_yaml(path, name)
    if "class_path" not in values:
        raise ValueError(f"{name}: expected a component (class_path and init_args) in {path}, got something else.")
    return values


def _next_version(folder: Path) -> str:
    """Return the first free ``version_N``; other processes of the same run are told through the environment."""
    shared = os.environ.get("REFUSION_LIT_RUN_VERSION")
    if shared:
        return shared
    taken = [int(p.name[8:]) for p in folder.glob("version_*") if p.name[8:].isdigit()]
    version = f"version_{max(taken, default=-1) + 1}"
    if "RANK" not in os.environ:
        os.environ["REFUSION_LIT_RUN_VERSION"] = version
    return version


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in str(record.msg)


def _prepare_directory(directory: Path) -> None:
    """Make a run's directory before any work, and keep the losses of an earlier run in it from the logger.

    Raises:
        ValueError: If nothing can be written there.
    """
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) != 0:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"runs_dir: expected a directory that can be written, got {directory} ({reason}); choose another one."
        ) from error
    metrics = directory / "metrics.csv"
    if metrics.is_file():
        number = sum(1 for _ in directory.glob("metrics_before_*.csv")) + 1
        metrics.rename(directory / f"metrics_before_{number}.csv")


def run(args: list[str]) -> int:
    """Run a subcommand of the Trainer."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
    try:
        return _run(args)
    except SIGTERMException as stopped:
        message = getattr(stopped, "message", f"stopped by SIGTERM; {_HOW_TO_GO_ON}")
        return _fail(message, int(stopped.code or 143))
    except MisconfigurationException as error:  # Lightning's word for a user's error
        return _fail(f"trainer: {' '.join(str(error).split())}", 2)
    except RuntimeError as error:
        if "closed by peer" not in str(error) and "reset by peer" not in str(error):
            raise
        return _fail("another process of this run has ended; its own error says why", 1)
    except SystemExit as stopped:
        if not isinstance(stopped.__context__, KeyboardInterrupt):
            raise
        return _fail(f"interrupted; {_HOW_TO_GO_ON}", 130)


def _fail(message: str, code: int) -> int:
    if rank_zero_only.rank == 0:  # all processes of a run stop for the same reason  # pyright: ignore[reportFunctionMemberAccess]
        sys.stderr.write(f"refusion-lit: error: {message}\n")
    return code


def _run(args: list[str]) -> int:
    if "LOCAL_RANK" not in os.environ:
        os.environ.pop("REFUSION_LIT_RUN_VERSION", None)
    for pattern in _EXPECTED if args[0] == "fit" else (*_EXPECTED, *_EXPECTED_WITHOUT_TRAINING):
        warnings.filterwarnings("ignore", message=pattern)
    RefusionCLI(
        SlotDiffusionModule,
        InstructionDataModule,
        args=args,
        save_config_callback=SaveRun,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
    )
    return 0
