"""Parameter groups of optimizers, and learning-rate schedules."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, num_warmup_steps: int, num_steps: int, final_ratio: float) -> LambdaLR:
    """Rise linearly to the optimizer's learning rate, then fall along half a cosine.

    Args:
        optimizer: Its learning rates are the peak.
        num_warmup_steps: Steps of the rise, at least 0.
        num_steps: All steps, after which the rate stays at its end.
        final_ratio: Rate at the end over the peak, in [0, 1].
    """

    def factor(step: int) -> float:
        rise = min(1.0, (step + 1) / max(num_warmup_steps, 1))
        done = min(max(step - num_warmup_steps, 0) / max(num_steps - num_warmup_steps, 1), 1.0)
        return rise * (final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * done)))

    return LambdaLR(optimizer, factor)


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split trainable parameters: matrices take the optimizer's weight decay, norms and biases none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
