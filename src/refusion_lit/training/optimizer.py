"""Parameter groups, the default learning-rate schedule, and a check of the weights' precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from refusion_lit.utils.require import require_at_least, require_probability


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up to the optimizer's learning rate, then cosine decay.

    Attributes:
        warmup_steps: Optimizer steps of warm-up, at least 0.
        final_lr_ratio: Learning rate at the end over its peak, in [0, 1].
    """

    warmup_steps: int = 100
    final_lr_ratio: float = 0.02

    def __post_init__(self) -> None:
        """Check the options."""
        require_at_least("model.schedule.warmup_steps", self.warmup_steps, 0)
        require_probability("model.schedule.final_lr_ratio", self.final_lr_ratio)

    def __call__(self, optimizer: Optimizer, num_steps: int) -> LambdaLR:
        """Return the schedule.

        Args:
            optimizer: Its learning rates are the peak.
            num_steps: Number of steps of the whole training, after which the rate stays constant.
        """

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / max(self.warmup_steps, 1))
            done = min(max(step - self.warmup_steps, 0) / max(num_steps - self.warmup_steps, 1), 1.0)
            return rise * (self.final_lr_ratio + (1 - self.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))

        return LambdaLR(optimizer, factor)


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the trainable parameters: matrices get the optimizer's weight decay, norms and biases none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def warn_of_lost_updates(optimizer: Optimizer) -> None:
    """Warn where an optimizer of ``torch.optim`` trains weights in bfloat16 or float16.

    These types have 8 and 11 significant bits: an update below 0.2 % (0.02 %) of a weight is rounded away, and most
    updates of a fine-tuning are smaller. Optimizers from elsewhere may keep float32 master weights or round
    stochastically, so they are trusted. ``experiments/precision`` measures the difference.
    """
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]} & {torch.bfloat16, torch.float16}
    if dtypes and type(optimizer).__module__.startswith("torch.optim"):
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        rank_zero_warn(
            f"trainer.precision: expected float32 weights for training with {type(optimizer).__name__}, got {names}, "
            "which rounds small updates away, so that the loss falls much less. Set model.backbone.dtype to float32 "
            "and trainer.precision to bf16-mixed, or use an optimizer with float32 master weights."
        )
