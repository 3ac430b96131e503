"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI over the module and the data module."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from refusion_lit import decoding, objectives, tasks
from refusion_lit.bundle import Bundle, is_checkpoint_file, read_checkpoint
from refusion_lit.cli.environment import write_environment
from refusion_lit.cli.parser import OneLineLightningParser, with_component_files
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.lit_module import SlotDiffusionModule

__all__ = ["RefusionCLI", "decoding", "objectives", "run", "tasks"]  # imported so that short class names resolve


# True, but nothing a user could act on.
_EXPECTED = (
    "LightningCLI's args parameter is intended",
    "Experiment logs directory .* exists and is not empty",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "The dirpath has changed from",
    "The .* does not have many workers",
    "The number of training batches",
    "Trying to infer the `batch_size`",
)


class SaveRun(SaveConfigCallback):
    """Saves the resolved config and the environment into the run's directory."""

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Write ``environment.json`` beside the config."""
        directory = Path(trainer.log_dir or trainer.default_root_dir)
        seed = self.config.get("seed_everything")
        write_environment(directory, seed)


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

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401 - Lightning's
        """Parse; a decoder may be given by its file."""
        super().parse_arguments(parser, with_component_files(args, "model.decoders"))

    def _parse_ckpt_path(self) -> None:
        """Do nothing: what a checkpoint stores must not override the config and the command line."""

    def before_instantiate_classes(self) -> None:
        """Choose the run's directory, and take architecture and tokenizer from a given checkpoint."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        if self.subcommand == "test":
            config.verbose = False  # our table says it, and more
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if config.trainer.logger in (None, True):
            version = config.run_version
            folder = Path(config.runs_dir) / config.run_name
            if version is None:
                version = _next_version(folder)
            shared = {"save_dir": config.runs_dir, "name": config.run_name, "version": version}
            config.trainer.logger = [
                Namespace(class_path=f"{cls.__module__}.{cls.__name__}", init_args=Namespace(**shared))
                for cls in (TensorBoardLogger, CSVLogger)
            ]
        source = config.get("ckpt_path")
        if self.subcommand in ("test", "predict", "validate") and source:
            self._use_source(config, str(source))

    def _use_source(self, config: Namespace, source: str) -> None:
        """Let a checkpoint decide what model it is; everything else stays with config and command line."""
        if is_checkpoint_file(source):
            bundle = Bundle.from_checkpoint(read_checkpoint(source), source)
            config.data.tokenizer = Namespace(
                class_path="refusion_lit.data.tokenizers.StoredTokenizer",
                init_args=Namespace(files=bundle.tokenizer_files),
            )
            config.model.backbone.source = None
            config.model.backbone.config = bundle.backbone_config().config
            return
        if source in ("best", "last", "hpc"):
            return
        config.data.tokenizer = Namespace(
            class_path="refusion_lit.data.tokenizers.PretrainedTokenizer",
            init_args=Namespace(source=source, revision=None, trust_remote_code=False),
        )
        config.model.backbone.source = source
        config.model.backbone.config = {}
        config.ckpt_path = None


class _ParseOnly(RefusionCLI):
    """Makes the parsers, and parses, seeds and builds nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:  # noqa: ANN401, ARG002
        self.config = Namespace(subcommand=None)

    def _set_seed(self) -> None: ...

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...


def parse_only() -> LightningArgumentParser:
    """Return the parser of all subcommands of the Trainer."""
    return _ParseOnly(SlotDiffusionModule, InstructionDataModule, args=[], seed_everything_default=0).parser


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


def run(args: list[str]) -> int:
    """Run a subcommand of the Trainer."""
    if "LOCAL_RANK" not in os.environ:
        os.environ.pop("REFUSION_LIT_RUN_VERSION", None)
    for pattern in _EXPECTED:
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
