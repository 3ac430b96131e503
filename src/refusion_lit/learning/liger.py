"""The fused head and cross-entropy of liger-kernel, for GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from typing import Literal

import torch
from torch import Tensor, nn

Kernel = Literal["torch", "liger"]

_MIN_VERSION = (0, 8, 5)
"""Older versions silently return wrong gradients when losses are weighted."""


def check_liger(device: torch.device) -> None:
    """Refuse liger-kernel where it cannot run.

    Raises:
        ValueError: If the package is missing or too old, or the device is no GPU.
    """
    needed = ".".join(map(str, _MIN_VERSION))
    try:
        found = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or tuple(map(int, re.findall(r"\d+", found)[:3])) < _MIN_VERSION:
        raise ValueError(
            f"objective.kernel: 'liger' needs liger-kernel {needed} or newer, got {found or 'none'}; install "
            "refusion-lit[liger], or set kernel to 'torch'."
        )
    if device.type == "cpu":
        raise ValueError("objective.kernel: 'liger' needs a GPU, got the device cpu; set kernel to 'torch'.")


def liger_losses(values: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    """Return each target's cross-entropy without logits in memory.

    Args:
        values: Hidden states ``[token, hidden]``.
        head: A linear layer.
        targets: Target of each hidden state.
    """
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    assert isinstance(head, nn.Linear)
    fused = LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)
    return fused(head.weight, values, targets, head.bias)
