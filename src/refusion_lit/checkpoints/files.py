"""Checkpoint files: finding them, reading them as data only, and checking their weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refusion_lit.modeling.fsdp import INDEX, check_index
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require

_PLAIN_VALUES = "meta.pt"


def is_sharded_checkpoint(path: str | Path) -> bool:
    """Whether a path is the directory of a sharded checkpoint."""
    return (Path(path) / INDEX).is_file()


def is_checkpoint_file(source: str | Path) -> bool:
    """Whether a source is a Lightning checkpoint rather than a Hugging Face directory or a hub id."""
    return str(source).endswith(".ckpt") or Path(source).is_file() or is_sharded_checkpoint(source)


def read_checkpoint(path: str | Path, *, mmap: bool = False) -> dict[str, Any]:
    """Load a checkpoint to the CPU without running any code in it. A sharded checkpoint's tensors stay on disk.

    Args:
        path: The checkpoint.
        mmap: Leave the tensors on disk until they are used.

    Raises:
        ValueError: If the file is missing, truncated or not a checkpoint, or a sharded checkpoint is incomplete or
            names code that no checkpoint needs.
    """
    if is_sharded_checkpoint(path):
        file = Path(path) / _PLAIN_VALUES
        got = f"{path}, which lacks {_PLAIN_VALUES}, written last"
        require(file.is_file(), "ckpt_path", "a complete checkpoint", got, "use an earlier one")
        check_index(Path(path) / INDEX)
    else:
        file = Path(path)
        expected = "a checkpoint file"
        fix = "a Hugging Face directory to start from goes into model.backbone.source"
        require(not file.is_dir(), "ckpt_path", expected, f"the directory {path}", fix)
        require(file.is_file(), "ckpt_path", expected, f"{path}, which does not exist", "check the path")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise ValueError(
            f"ckpt_path: {path} cannot be read as a checkpoint ({error_reason(error)}); check the path, or "
            "give another."
        ) from error


def model_source(source: str | Path) -> str:
    """Return the model that ``ckpt_path`` names: for a run's directory its ``last.ckpt``, named on standard error.

    Raises:
        ValueError: If the path is empty, a drafter, or a directory with other checkpoints; names the newest.
    """
    option = "ckpt_path"
    expected = "a checkpoint, a Hugging Face directory or a hub id"
    path = Path(source)
    require(str(source) != "", option, expected, source, "give one")
    fix = "give it with --draft, and its model as ckpt_path"
    is_drafter = (path / "drafter.json").is_file() and not (path / "config.json").is_file()
    require(not is_drafter, option, expected, f"{source}, which is a drafter", fix)
    if path.is_dir() and not is_checkpoint_file(source) and not (path / "config.json").is_file():
        last = path / "checkpoints" / "last.ckpt"
        if last.exists():
            sys.stderr.write(f"checkpoint: {last}\n")
            return str(last)
        newest = newest_checkpoint([path])
        fix = "a model directory has config.json, tokenizer.json and weights"
        fix = f"give one of its checkpoints, such as {newest}" if newest else fix
        is_adapter = (path / "adapter_config.json").is_file()  # refused where it is loaded
        require(newest is None and is_adapter, option, expected, str(source), fix)
    return str(source)


def newest_checkpoint(folders: Sequence[Path], *, resumable: bool = False) -> Path | None:
    """Return the newest readable checkpoint in some directories and below; ``None`` without any.

    Among files with equal times, ``last.ckpt`` counts as the newest, because file systems' clocks tick too slowly to
    tell checkpoints of small models apart.

    Args:
        folders: The directories.
        resumable: Leave out files that hold only weights (``save_weights_only``), from which no training resumes.
    """
    paths = [path for folder in folders for path in folder.rglob("*.ckpt") if not path.name.startswith(".")]
    paths.sort(key=lambda path: (path.stat().st_mtime_ns, path.name == "last.ckpt"), reverse=True)
    return next((path for path in paths if _is_readable(path, resumable=resumable)), None)


def check_weights(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse weights whose names or shapes differ from a model's, or that are not finite.

    Args:
        stored: Weights by name.
        expected: The model's weights by name.

    Raises:
        ValueError: Naming the first weight that is missing, unexpected, of another shape, infinite or not a number.
    """
    for name in sorted({*stored, *expected}):
        shape = tuple(stored[name].shape) if name in stored else None
        wanted = tuple(expected[name].shape) if name in expected else None
        fitting = f"weights that fit the architecture in the config, with {name} of shape {wanted}"
        require(shape == wanted, "ckpt_path", fitting, shape, "take the config that the checkpoint was trained with")
        is_finite = bool(stored[name].isfinite().all())
        got = "infinities or NaN: the training had diverged"
        require(is_finite, "ckpt_path", f"finite weights in {name}", got, "take an earlier checkpoint")


def _is_readable(path: Path, *, resumable: bool) -> bool:
    try:
        content = read_checkpoint(path, mmap=True)
    except ValueError:
        return False
    return path.is_dir() or not resumable or "optimizer_states" in content
