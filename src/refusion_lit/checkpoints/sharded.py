"""Checkpoints of sharded runs: directories with one piece from each process."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint

_INDEX, _PLAIN_VALUES = ".metadata", "meta.pt"
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
# Modules and names that torch writes into the index, which is a pickle; None allows all names of a module.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "collections": {"OrderedDict"},
}


def is_sharded_checkpoint(path: str | Path) -> bool:
    """Whether a path is the directory of a sharded checkpoint."""
    return (Path(path) / _INDEX).is_file()


def is_complete_sharded(path: str | Path) -> bool:
    """Whether the directory of a sharded checkpoint has its plain values, which Lightning writes last."""
    return (Path(path) / _PLAIN_VALUES).is_file()


def read_without_tensors(path: str | Path) -> dict[str, Any]:
    """Return a sharded checkpoint's values without its tensors, without running anything in it.

    Raises:
        ValueError: If it is incomplete, or its index names code that no checkpoint needs.
    """
    if not is_complete_sharded(path):
        raise ValueError(
            f"ckpt_path: {path} lacks {_PLAIN_VALUES}, which is written last; it is not complete. Use an earlier "
            "checkpoint."
        )
    _check_index(Path(path) / _INDEX)
    return torch.load(Path(path) / _PLAIN_VALUES, map_location="cpu", weights_only=True)


def load_sharded(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Load a sharded checkpoint into tensors in place, in this process alone.

    Args:
        path: The checkpoint's directory.
        tensors: Tensors to fill, by their names in the module that was saved.

    Raises:
        ValueError: If the index is unsafe, or a tensor is missing or has another shape.
    """
    _check_index(Path(path) / _INDEX)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            distributed_checkpoint.load({"state_dict": tensors}, checkpoint_id=str(path), no_dist=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]  # torch lists processes first
        raise ValueError(
            f"ckpt_path: the pieces in {path} cannot be put together ({reason}); give another checkpoint."
        ) from error


class _IndexUnpickler(pickle.Unpickler):
    """Refuses names outside ``_ALLOWED``; types of torch pass."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - pickle's signature
        names = _ALLOWED.get(module, set())
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | type(torch.Size))
        if is_type or names is None or name in names:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _check_index(path: Path) -> None:
    """Unpickle a directory's index once with the restricted unpickler, before torch does it without restriction.

    Raises:
        ValueError: If it names anything else than torch's own types, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            _IndexUnpickler(file).load()
    except Exception as error:
        raise ValueError(
            f"ckpt_path: the index {path} cannot be read safely ({error}). Do not use a checkpoint of unknown origin."
        ) from error
