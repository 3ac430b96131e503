"""Reads and checks files with tensors: finds the files, reads headers and values."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require

_NAMES = "model.safetensors", "pytorch_model.bin"
"""Possible names of a file with all weights, in transformers' order of preference. Shards have an index."""

_FETCH = "fetch it again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A stored tensor, as described in its file's header.

    Attributes:
        file: The file.
        shape: The sizes.
        dtype: The name of the type, in the file format's spelling: ``BF16``, ``int32``.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether the values are floating-point numbers."""
        return self.dtype.lower().startswith(("f", "bf"))


def weight_files(folder: Path) -> list[Path]:
    """Return a directory's weight files: the files that transformers reads, else all safetensors files."""
    shards = sorted({folder / name for name in _used_index(folder).values()})
    single = [folder / name for name in _NAMES if (folder / name).is_file()]
    return shards or single[:1] or sorted(folder.glob("*.safetensors"))


def _check_shards(folder: Path, where: str) -> None:
    """Refuse an index without files, with a file outside the directory (directories are not trusted) or a missing file.

    Raises:
        ValueError: Naming the index, or the missing files.
    """
    for index in folder.glob("*.index.json"):
        files = _index(index)
        expected = f"a weight_map with the file of each tensor in {index}"
        is_used = index.name in [f"{name}.index.json" for name in _NAMES]
        require(bool(files) or not is_used, where, expected, None, _FETCH)
        for name in sorted({*files.values()}):
            inside = not Path(name).is_absolute() and ".." not in Path(name).parts
            require(inside, where, f"files of the directory in {index}", name, _FETCH)
    missing = [file.name for file in weight_files(folder) if not file.is_file()]
    option = f"{where}: {str(folder)!r}"
    require(not missing, option, "all shards of its index", f"none for {', '.join(missing)}", "fetch them again")


def _used_index(folder: Path) -> dict[str, str]:
    """Return every tensor's file from the index that transformers reads; empty for a single file of weights."""
    for name in _NAMES:
        if (folder / name).is_file():
            break
        if (index := folder / f"{name}.index.json").is_file():
            return _index(index)
    return {}


def _index(file: Path) -> dict[str, str]:
    """Return every tensor's file from an index; empty if the index is damaged."""
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        shards = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(name) for tensor, name in shards.items()}
    return {}


def read_headers(folder: Path, where: str) -> dict[str, StoredTensor]:
    """Return a directory's stored tensors by name, without their values.

    Args:
        folder: The directory.
        where: The option that named the directory, for messages.

    Raises:
        ValueError: If a file is damaged or missing, the index names a file outside the directory, two files hold a
            tensor with the same name, or no file holds a tensor in the index.
    """
    _check_shards(folder, where)
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for name, tensor in _read_header(file, where).items():
            twice = name in tensors
            got = f"{name} in {tensors[name].file.name}, too" if twice else ""
            require(not twice, f"{where}: {file}", "tensors that no other shard holds", got, "fetch the shards again")
            tensors[name] = tensor
    for tensor, name in sorted(_used_index(folder).items()):
        expected = f"{tensor} in {name}, as its index says"
        require(tensor in tensors, f"{where}: {folder}", expected, None, "fetch both files again")
    return tensors


def _read_header(file: Path, where: str) -> dict[str, StoredTensor]:
    """Return a file's tensors by name, without their values; ``where`` names the option in messages."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
                return {
                    name: StoredTensor(file=file, shape=tuple(tensor.get_shape()), dtype=tensor.get_dtype())
                    for name, tensor in slices.items()
                }
        return {
            name: StoredTensor(file=file, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in _load_tensors(file, "meta").items()
        }
    except Exception as error:  # the formats' readers raise their own errors for damaged files
        raise unreadable(where, file, error) from error


def unreadable(where: str, place: str | Path, error: Exception) -> ValueError:
    """Return the error for weights that cannot be read."""
    return ValueError(
        f"{where}: the weights of {str(place)!r} cannot be loaded ({error_reason(error)}). They may be "
        "truncated or of another architecture than config.json says; fetch them again."
    )


def _load_tensors(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Return a file's tensors; no code in it runs."""
    if file.suffix == ".safetensors":
        return load_file(file, device)
    values: Mapping[str, Any] = torch.load(file, map_location=device, weights_only=True)
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def check_types(tensors: Mapping[str, StoredTensor], where: str, integers: Collection[str] = ()) -> None:
    """Refuse stored integers in place of floating-point weights: torch would convert them silently.

    Args:
        tensors: The stored tensors.
        where: The option that named the directory, for messages.
        integers: Names of tensors that are integers in the model, too.

    Raises:
        ValueError: Naming the first tensor of another type.
    """
    for name, tensor in tensors.items():
        if not tensor.is_float and name not in integers:
            expected = f"floating-point numbers in {name}"
            fix = "fetch it again, or load the checkpoint that was quantised"
            require(False, f"{where}: {tensor.file}", expected, tensor.dtype, fix)


def first_not_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight with NaN or an infinity; ``None`` if all values are finite.

    The sum is computed first, because it is faster than minimum and maximum: if the sum is finite, all values are
    finite. Large finite values may overflow a sum, mostly in float16. Minimum and maximum then decide: NaN makes both
    NaN, and an infinity is one of them. Neither pass copies the weight, whereas ``isfinite`` would allocate a mask. The
    pass reads the pages of mapped files, which the first forward pass would otherwise read.

    >>> first_not_finite([("head", torch.ones(2)), ("norm", torch.tensor([0.0, -torch.inf]))])
    'norm'
    """
    for name, weight in weights:
        if not weight.is_floating_point() or weight.is_meta or not weight.numel():
            continue
        values = weight.detach()
        values = values.float() if values.dtype.itemsize == 1 else values  # float8 has neither sum nor minimum
        if not values.sum().isfinite() and not torch.stack(torch.aminmax(values)).isfinite().all():
            return name
    return None


def check_loaded_values(weights: Mapping[str, Tensor], files: Iterable[Path]) -> None:
    """Refuse a model's weights that are not finite.

    Args:
        weights: The weights, by the model's names.
        files: The weights' files, which are searched only if a weight is not finite.

    Raises:
        ValueError: Naming the stored tensor and its file. If the stored values are finite, but too large for the type
            of loading: naming the weight.
    """
    weight = first_not_finite(weights.items())
    if weight is None:
        return
    for file in files:
        if name := first_not_finite(_load_tensors(file).items()):
            raise _not_finite(f"backbone.source: {file}", name)
    dtype = str(weights[weight].dtype).removeprefix("torch.")
    expected = f"weights within the range of {dtype} in {weight}"
    require(False, "backbone.source", expected, "larger values", "load them in bfloat16 or float32 (dtype)")


def _not_finite(where: str, name: str) -> ValueError:
    return ValueError(
        f"{where}: expected finite weights in {name}, got NaN or an infinity; fetch the file again, or take an earlier "
        "checkpoint: the training may have diverged."
    )


def load_checked(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors in a drafter's files; they must be finite floating-point numbers.

    Args:
        files: The files.

    Raises:
        ValueError: Naming file and tensor.
        OSError, SafetensorError: If a file cannot be read.
    """
    weights: dict[str, Tensor] = {}
    for file in files:
        stored = _load_tensors(file)
        check_types(_read_header(file, "draft"), "draft")
        if name := first_not_finite(stored.items()):
            raise _not_finite(f"draft: {file}", name)
        weights |= stored
    return weights
