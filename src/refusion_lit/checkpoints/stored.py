"""Checkpoint files: finding them, reading them as data only, and comparing their weights with a model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refusion_lit.checkpoints.sharded import is_complete_sharded, is_sharded_checkpoint, read_without_tensors
from refusion_lit.utils.errors import reason_of
from refusion_lit.utils.require import require


def is_checkpoint_file(source: str | Path) -> bool:
    """Whether a source is a Lightning checkpoint rather than a Hugging Face directory or a hub id."""
    return str(source).endswith(".ckpt") or Path(source).is_file() or is_sharded_checkpoint(source)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint to the CPU without running anything in it; a sharded one without its tensors.

    Raises:
        ValueError: If the file is missing, truncated or not a checkpoint.
    """
    if is_sharded_checkpoint(path):
        return read_without_tensors(path)
    if Path(path).is_dir():
        raise ValueError(
            f"ckpt_path: expected a checkpoint file, got the directory {path}; a Hugging Face directory to start from "
            "goes into model.backbone.source."
        )
    if not Path(path).is_file():
        raise ValueError(f"ckpt_path: expected a checkpoint file, got {path}, which does not exist. Check the path.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"ckpt_path: {path} cannot be read as a checkpoint ({reason_of(error)}). Use another one."
        ) from error


def check_model_source(source: str | Path) -> None:
    """Refuse an empty name, a drafter, and a run's directory, whose checkpoint is meant.

    Raises:
        ValueError: Naming the newest checkpoint in the directory.
    """
    option, expected, path = "ckpt_path", "a checkpoint, a Hugging Face directory or a hub id", Path(source)
    require(str(source) != "", option, expected, source, "give one")
    fix = "give it with --draft, and its model as ckpt_path"
    require(not (path / "drafter.json").is_file(), option, expected, f"{source}, which is a drafter", fix)
    if path.is_dir() and not is_checkpoint_file(source) and not (path / "config.json").is_file():
        newest = newest_checkpoint([path])
        require(newest is None, option, expected, str(source), f"give one of its checkpoints, such as {newest}")


def newest_checkpoint(folders: Sequence[Path], *, resumable: bool = False) -> Path | None:
    """Return the newest readable checkpoint in some directories and below, ``None`` if there is none.

    Of files of the same time ``last.ckpt`` is the newest: a file system's clock ticks more slowly than small models are
    saved.

    Args:
        folders: The directories.
        resumable: Leave out files of weights alone (``save_weights_only``), from which no training resumes.
    """
    found = [path for folder in folders for path in folder.rglob("*.ckpt") if not path.name.startswith(".")]
    for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name == "last.ckpt"), reverse=True):
        if _is_readable(path, resumable=resumable):
            return path
    return None


def check_weights(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], option: str) -> None:
    """Refuse weights whose names or shapes are not a model's, or that are not finite.

    Args:
        stored: Weights by name.
        expected: The model's weights by name.
        option: The option that named the weights, for the message.

    Raises:
        ValueError: Naming the first weight that is missing, unexpected, of another shape, infinite or not a number.
    """
    for name in sorted({*stored, *expected}):
        got = tuple(stored[name].shape) if name in stored else None
        wanted = tuple(expected[name].shape) if name in expected else None
        if got != wanted:
            raise ValueError(
                f"{option}: expected weights that fit the architecture in the config, got {name} of shape {got}, not "
                f"{wanted}. Take the config that the checkpoint was trained with."
            )
        if not bool(stored[name].isfinite().all()):
            raise ValueError(
                f"{option}: expected finite weights, got infinities or NaN in {name}: the training had diverged. Take "
                "an earlier checkpoint."
            )


def _is_readable(path: Path, *, resumable: bool) -> bool:
    if path.is_dir():
        return is_complete_sharded(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a damaged file can raise anything
        return False
    return not resumable or "optimizer_states" in content
