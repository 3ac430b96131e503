"""Sharded checkpoints, which FSDP2 writes as directories: checks the index, and loads the pieces in one process."""

from __future__ import annotations

import pickle
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint

from refusion_lit.utils.errors import last_line

INDEX = ".metadata"
"""File in a sharded checkpoint's directory that lists the contents of every piece."""
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
# Modules and names that torch writes into the index, which is a pickle; None allows all classes of a module.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "collections": {"OrderedDict"},
}


def load_sharded(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Load a sharded checkpoint into tensors in place, in this process alone.

    Args:
        path: The checkpoint's directory.
        tensors: Tensors to fill, by their names in the saved module.

    Raises:
        ValueError: If the index is unsafe, or a tensor is missing, has another shape, or holds integers in place of
            floating-point numbers.
    """
    check_index(Path(path) / INDEX)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            stored = distributed_checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
            for name, tensor in tensors.items():  # loading would convert the numbers
                dtype = getattr(getattr(stored.get(f"state_dict.{name}"), "properties", None), "dtype", tensor.dtype)
                if dtype.is_floating_point != tensor.is_floating_point():
                    raise TypeError(f"{name} holds numbers of type {dtype}, not {tensor.dtype}")
            distributed_checkpoint.load({"state_dict": tensors}, checkpoint_id=str(path), no_dist=True)
    except Exception as error:
        raise ValueError(  # torch lists processes first
            f"ckpt_path: the pieces in {path} cannot be put together ({last_line(error)}); give an older checkpoint."
        ) from error


def _member(owner: type[Enum], name: str) -> Enum:
    """Return an enumeration's member. An index written by an early Python 3.11 calls ``getattr`` for it."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise pickle.UnpicklingError(f"it reads {name} of {owner!r}")
    return owner[name]


class _IndexUnpickler(pickle.Unpickler):
    """Refuses names outside ``_ALLOWED``; types of torch pass."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - pickle's signature
        if (module, name) == ("builtins", "getattr"):
            return _member
        names = _ALLOWED.get(module, set())
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | type(torch.Size))
        if is_type or name in (names or ()):
            return super().find_class(module, name)
        if names is None and "." not in name:  # a dotted name reaches what the module imports
            member = super().find_class(module, name)
            if isinstance(member, type) and member.__module__ == module:
                return member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def check_index(path: Path) -> None:
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
