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

_BLOCK = 256


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

    On CPUs torch finds an index ten times slower than a value, so large vocabularies are searched for the best block
    of ids first (benchmarks/fast_paths.py).
    """
    vocab = logits.shape[-1]
    size = _BLOCK
    if logits.device.type != "cpu" or vocab < 32 * size:
        return logits.argmax(-1)
    num_blocks = vocab // size
    highest = logits[:, : num_blocks * size].unflatten(-1, (num_blocks, size)).amax(-1)
    if num_blocks * size < vocab:
        highest = torch.cat((highest, logits[:, num_blocks * size :].amax(-1, keepdim=True)), -1)
    # Pad the block with copies of the last value: they never win a tie.
    index = (highest.argmax(-1, keepdim=True) * size + torch.arange(size)).clamp_max_(vocab - 1)
    return index.gather(-1, logits.gather(-1, index).argmax(-1, keepdim=True))[:, 0]
