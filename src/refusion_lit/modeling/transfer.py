"""Copies between host and device: host-to-device copies are non-blocking, device-to-host copies block.

A copy from pageable memory to a GPU waits until all work queued there is done. Decoding copies only through
:func:`to_device` and :func:`to_host`, so that tests can count how often the host waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
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


def to_host(values: Tensor) -> Any:  # noqa: ANN401 - lists nested as deeply as the tensor has axes
    """Wait for the device and return a tensor's numbers as nested lists."""
    return values.cpu().tolist()


def synchronised_time(device: torch.device) -> float:
    """Return the time in seconds once a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
