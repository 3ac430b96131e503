"""Checkpoints of sharded runs: directories with a piece from each process."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint

_METADATA, _REST = ".metadata", "meta.pt"
# What torch writes into the directory's index. It is a pickle, so nothing else may be named in it.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}


def is_sharded_checkpoint(path: str | Path) -> bool:
    """Whether a path is the directory of a sharded checkpoint."""
    return (Path(path) / _METADATA).is_file()


def read_rest(path: str | Path) -> dict[str, Any]:
    """Return what a sharded checkpoint holds besides tensors, without running anything in it.

    Raises:
        ValueError: If it is torn, or names what no checkpoint needs.
    """
    rest = Path(path) / _REST
    if not rest.is_file():
        raise ValueError(
            f"ckpt_path: {path} lacks {_REST}, which is written last; it is not complete. Use an earlier checkpoint."
        )
    _check_index(Path(path) / _METADATA)
    return torch.load(rest, map_location="cpu", weights_only=True)


def load_sharded(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place from a sharded checkpoint, in this process alone.

    Args:
        path: The checkpoint's directory.
        tensors: By their names in the module that was saved.

    Raises:
        ValueError: If the index is unsafe, or a tensor is missing or has another shape.
    """
    _check_index(Path(path) / _METADATA)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            distributed_checkpoint.load({"state_dict": tensors}, checkpoint_id=str(path), no_dist=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(f"ckpt_path: the pieces in {path} cannot be put together ({reason}).") from error


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - pickle's signature
        names = _ALLOWED.get(module, set())
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | type(torch.Size))
        if is_type or names is None or name in names:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _check_index(path: Path) -> None:
    try:
        with path.open("rb") as file:
            _Index(file).load()
    except Exception as error:
        raise ValueError(
            f"ckpt_path: the index {path} cannot be read safely ({error}). Do not use a checkpoint of unknown origin."
        ) from error
