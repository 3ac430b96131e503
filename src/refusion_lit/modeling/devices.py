"""What depends on the device: copies to it, time, and a fast argmax.

A copy from pageable memory to a GPU would wait until all work queued there is done, as a copy to the host does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def to_device(values: Sequence[int] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for it.

    Args:
        values: Integers, or an array or CPU tensor of any type.
        device: Destination.
    """
    if not isinstance(values, Tensor):
        values = torch.from_numpy(values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64))
    if device.type == "cpu":
        return values
    if device.type == "cuda":
        values = values.pin_memory()  # copies from pageable memory would block the host
    return values.to(device, non_blocking=True)


def synchronised_time(device: torch.device) -> float:
    """Return the time in seconds once a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def first_argmax(logits: Float[Tensor, "position vocab"]) -> Int[Tensor, " position"]:
    """Return the index of each row's highest value, the lowest index among ties; NaN counts as the highest.

    On CPUs torch takes up to ten times as long as numpy, which takes a row at a time (benchmarks/fast_paths.py).
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return to_device([row.argmax() for row in logits.numpy()], logits.device)
