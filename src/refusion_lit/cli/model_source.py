"""Takes architecture and tokenizer from the checkpoint that ``validate``, ``test`` or ``predict`` is given."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from refusion_lit.checkpoints.files import (
    check_model_source,
    is_checkpoint_file,
    is_sharded_checkpoint,
    newest_checkpoint,
    read_checkpoint,
)
from refusion_lit.checkpoints.models import CheckpointMetadata
from refusion_lit.modeling.hub import check_source


def last_checkpoint(config: Namespace, command: str) -> Path | None:
    """Return the newest checkpoint of the run's name; for ``fit``, of the run's version if one is named.

    Raises:
        ValueError: If there is none, except for ``fit``.
    """
    folder = Path(config.runs_dir) / config.run_name
    folders = [folder / config.run_version if config.run_version and command == "fit" else folder]
    for callback in config.trainer.callbacks or []:
        dirpath = callback.get("init_args", Namespace()).get("dirpath")
        folders += [Path(dirpath)] if dirpath else []
    path = newest_checkpoint(folders, resumable=command == "fit")
    if path is None and command != "fit":
        raise ValueError(f"ckpt_path: expected a checkpoint for 'last' in {folders[0]}, found none; give its path.")
    return path


def use_source(config: Namespace, source: str) -> None:
    """Let a checkpoint or directory decide what the model is; all other options stay as given.

    Raises:
        ValueError: If it cannot be read, or not with the strategy of the config.
    """
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
        drafter = stored.drafter  # with its weights in the checkpoint
        config.model.backbone.drafter = None if drafter is None else Namespace(**asdict(drafter))
        config.model.backbone.draft = None
        return
    if source == "best":
        raise ValueError("ckpt_path: expected a path or 'last', got 'best', which only a training knows; give a path.")
    if source == "hpc":
        return
    check_model_source(source)
    check_source(source, "ckpt_path")
    config.data.tokenizer = Namespace(
        class_path="refusion_lit.data.tokenizers.PretrainedTokenizer",
        init_args=Namespace(source=source, revision=None, trust_remote_code=False),
    )
    config.model.backbone.source = source
    config.model.backbone.config = {}
    config.model.backbone.random_init = False
    config.model.backbone.lora = None
    config.ckpt_path = None


def check_backbone(backbone: Namespace, command: str) -> None:
    """Refuse a command without any model, and warn about random weights.

    Raises:
        ValueError: If there is neither a checkpoint nor a model in the config.
    """
    if backbone.source is None and "model_type" not in backbone.config:
        raise ValueError(
            f"ckpt_path: expected a checkpoint, a Hugging Face directory or a hub id to {command}, got none, and the "
            "config names no model.backbone either; give --ckpt_path."
        )
    if backbone.source is None or backbone.random_init:
        rank_zero_warn("ckpt_path: none given, so that the model has random weights; give --ckpt_path to use others")


def _check_sharding(config: Namespace, source: str) -> None:
    """Refuse a sharded checkpoint if the strategy cannot read one."""
    strategy = str(getattr(config.trainer.strategy, "class_path", config.trainer.strategy))
    if is_sharded_checkpoint(source) and not strategy.endswith("ModelParallelStrategy"):
        raise ValueError(
            f"ckpt_path: {source} is a sharded checkpoint, which the strategy {strategy} cannot read. Turn it into a "
            "directory with `refusion-lit export`, or test with the strategy ModelParallelStrategy."
        )
