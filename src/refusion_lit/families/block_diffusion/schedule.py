"""BD3-LM's mask schedules and clipped intervals of mask probabilities (arXiv 2503.09573)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from refusion_lit.utils.require import require, require_at_least, require_number

Schedule = Literal["linear", "square", "square_root", "log", "cosine"]
"""Names of the mask schedules; see :class:`~refusion_lit.objectives.BlockMasked`."""

UNCLIPPED = (1e-3, 1.0)
"""The interval that counts as unclipped: a likelihood bound, whose limits are not enforced."""

_POWERS: Mapping[str, float] = {"linear": 1.0, "square": 2.0, "square_root": 0.5}


def mask_schedule(schedule: Schedule, times: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """Return the mask probability p(t) of a noise schedule and the weight of a masked token, p'(t) / p(t).

    The schedules of BD3-LM's program, arXiv 2503.09573.

    Args:
        schedule: Its name; see :class:`~refusion_lit.objectives.BlockMasked`.
        times: t, in (0, 1].
    """
    if schedule in _POWERS:
        power = _POWERS[schedule]
        probability = (times**power).clamp(min=UNCLIPPED[0])
        return probability, power * times ** (power - 1) / probability
    if schedule == "log":
        probability = torch.log2(1 + times)
        return probability, 1 / (probability * math.log(2) * (1 + times))
    eps, angle = UNCLIPPED[0], math.pi / 2 * times
    probability = 1 - (1 - eps) * torch.cos(angle)
    return probability, math.pi / 2 * (1 - eps) * torch.sin(angle) / (probability + eps)


def clipped_intervals(widths: Sequence[float], delta: float) -> list[tuple[float, float]]:
    """Return the intervals of mask probabilities that BD3-LM's search chooses from: the unclipped one first.

    Args:
        widths: Widths of the clipped ones.
        delta: Distance between the lower limits of those of one width, from 0 (or the lowest probability) on.
    """
    found = [UNCLIPPED]
    fix = "name widths such as [0.5, 0.9], or none"
    require(isinstance(widths, Sequence), "objective.search_widths", "a list of numbers", widths, fix)
    for width in widths:
        for number in range(int((1 - width) / delta + 1e-9) + 1):
            low = round(number * delta, 9)
            found.append((max(low, UNCLIPPED[0]), round(low + width, 9)))
    return found


def check_search(widths: Sequence[float], every: int, delta: float, num_batches: int) -> None:
    """Refuse options with which no interval can be searched.

    Raises:
        ValueError: Naming the option.
    """
    fix = "name widths such as [0.5, 0.9], or none"
    require(isinstance(widths, Sequence), "objective.search_widths", "a list of numbers", widths, fix)
    for width in widths:
        require_number("objective.search_widths", width, f"({UNCLIPPED[0]}, 1)")
    require_at_least("objective.search_every", every, 1)
    require_number("objective.search_delta", delta, "(0, 1)")
    require_at_least("objective.search_batches", num_batches, 1)
