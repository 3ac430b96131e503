"""Operations that depend on the device: copies, synchronised time, argmax, and out-of-memory errors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def to_device(values: Sequence[int] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for the device.

    Args:
        values: Integers, or an array or CPU tensor of any type.
        device: Destination.
    """
    if not isinstance(values, Tensor):
        values = torch.from_numpy(values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64))
    if device.type == "cpu":
        return values
    if device.type == "cuda":
        values = values.pin_memory()  # a copy from pageable memory would wait until all queued work is done
    return values.to(device, non_blocking=True)


def synchronised_time(device: torch.device) -> float:
    """Wait until a device has finished its work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def first_argmax(logits: Float[Tensor, "position vocab"]) -> Int[Tensor, " position"]:
    """Return the index of every row's highest value, the lowest index if values tie. NaN counts as the highest.

    On CPUs, torch takes several times as long as numpy, which uses vector instructions within a row.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # On CPUs, torch raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
