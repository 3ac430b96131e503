"""Between host and device: what is sent makes nobody wait, and there is one way back, which does.

A plain copy from ordinary memory to a GPU waits until everything queued there is done. Everything that decoding sends
goes through :func:`to_device`, everything it learns comes through :func:`to_host`, so that meetings of host and device
can be counted, and tests count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: Sequence[int] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Send numbers to a device without waiting for it.

    Args:
        values: Integers, or an array or CPU tensor of any type.
        device: Where to.
    """
    if not isinstance(values, Tensor):
        values = torch.from_numpy(values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64))
    if device.type == "cpu":
        return values
    if device.type == "cuda":
        values = values.pin_memory()  # only from pinned memory is a copy made while the host goes on
    return values.to(device, non_blocking=True)


def to_host(values: Tensor) -> Any:  # noqa: ANN401 - lists nested as deeply as the tensor has axes
    """Wait for the device and return a tensor's numbers as nested lists."""
    return values.cpu().tolist()
