"""Checkpoint files: finding them, reading them as data only, and checking their weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from refusion_lit.checkpoints.sharded import INDEX, check_index
from refusion_lit.modeling.stored_tensors import first_not_finite
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
            names code that no checkpoint needs. For a run's checkpoint, the message names the newest whole checkpoint.
    """
    file = _find_values(path)
    try:
        return _load_file(file, mmap=mmap)
    except Exception as error:
        reason = error_reason(error) if is_zipfile(file) else "it is truncated, or not what torch.save writes"
        whole = newest_checkpoint([Path(path).parent]) if Path(path).parent.name == "checkpoints" else None
        fix = f"give the newest whole checkpoint beside it, {whole}" if whole else "check the path, or give another"
        raise ValueError(f"ckpt_path: {path} cannot be read as a checkpoint ({reason}); {fix}.") from error


def _find_values(path: str | Path) -> Path:
    """Return the file with a checkpoint's plain values; check that the checkpoint exists.

    Raises:
        ValueError: If the file is missing, or a sharded checkpoint is incomplete or unsafe.
    """
    if is_sharded_checkpoint(path):
        file = Path(path) / _PLAIN_VALUES
        got = f"{path}, which lacks {_PLAIN_VALUES}, the file that is written last"
        require(file.is_file(), "ckpt_path", "a complete checkpoint", got, "use an earlier checkpoint")
        check_index(Path(path) / INDEX)
    else:
        file = Path(path)
        expected = "a checkpoint file"
        fix = "a Hugging Face directory to start from goes into model.backbone.source"
        require(not file.is_dir(), "ckpt_path", expected, f"the directory {path}", fix)
        require(file.is_file(), "ckpt_path", expected, f"{path}, which does not exist", "check the path")
    return file


def _load_file(file: Path, *, mmap: bool) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def model_source(source: str | Path) -> str:
    """Return the model in ``ckpt_path``. For a run's directory: its ``last.ckpt``, which is printed on standard error.

    Raises:
        ValueError: If the path is empty, a drafter, or a directory with other checkpoints; names the newest.
    """
    option = "ckpt_path"
    expected = "a checkpoint, a Hugging Face directory or a hub id"
    path = Path(source)
    require(str(source) != "", option, expected, source, "give one")
    fix = "give the drafter with --draft, and its base model as ckpt_path"
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


def newest_checkpoint(folders: Sequence[Path]) -> Path | None:
    """Return the newest whole checkpoint in some directories and below; ``None`` without any.

    Among files with equal times, ``last.ckpt`` counts as the newest, because file systems' clocks tick too slowly to
    tell checkpoints of small models apart.
    """
    return find_newest(folders)[0]


def find_newest(folders: Sequence[Path], *, resumable: bool = False) -> tuple[Path | None, list[Path]]:
    """Return the newest whole checkpoint, and the damaged checkpoints that are newer; see :func:`newest_checkpoint`.

    Args:
        folders: The directories.
        resumable: Skip files with weights only (``save_weights_only``): no training can resume from them.
    """
    paths = [path for folder in folders for path in folder.rglob("*.ckpt") if not path.name.startswith(".")]
    paths.sort(key=lambda path: (path.stat().st_mtime_ns, path.name == "last.ckpt"), reverse=True)
    damaged = []
    for path in paths:
        try:
            content = _load_file(_find_values(path), mmap=True)
        except Exception:  # torch raises many types for a damaged file
            damaged.append(path)
            continue
        if path.is_dir() or not resumable or "optimizer_states" in content:
            return path, damaged
    return None, damaged


def check_weights(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: str | Path | None = None) -> None:
    """Refuse weights that are not finite, or whose names, shapes or kinds of numbers do not fit a model.

    Args:
        stored: Weights by name.
        expected: The model's weights by name.
        path: The checkpoint, for messages.

    Raises:
        ValueError: Naming the first weight that is missing, unexpected, of another shape, of integers in place of
            floating-point numbers, infinite or not a number.
    """
    for name in sorted({*stored, *expected}):
        shape = tuple(stored[name].shape) if name in stored else None
        wanted = tuple(expected[name].shape) if name in expected else None
        fitting = f"weights that fit the architecture in the config, with {name} of shape {wanted}"
        require(shape == wanted, "ckpt_path", fitting, shape, "take the config that the checkpoint was trained with")
        fits = stored[name].is_floating_point() == expected[name].is_floating_point()
        numbers = "floating-point numbers" if expected[name].is_floating_point() else str(expected[name].dtype)
        fitting = f"{numbers} in {name}{_in(path)}"
        require(fits, "ckpt_path", fitting, str(stored[name].dtype), "take another checkpoint")
    check_finite_weights(stored, path)


def _in(path: str | Path | None) -> str:
    return "" if path is None else f" of {path}"


def check_finite_weights(weights: Mapping[str, Tensor], path: str | Path | None = None) -> None:
    """Refuse a checkpoint with weights that are infinite or not a number.

    Args:
        weights: The weights by name.
        path: The checkpoint, for messages.

    Raises:
        ValueError: Naming the first such weight.
    """
    name = first_not_finite(sorted(weights.items()))
    got = "infinities or NaN: the training had diverged"
    require(name is None, "ckpt_path", f"finite weights in {name}{_in(path)}", got, "take an earlier checkpoint")
