"""Measured cost of forwards as a function of their length, for decoders that weigh forwards against positions."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from refusion_lit.types import ForwardCost

_MAX_POSITIONS = 256
_LONGEST, _NUM_REPEATS = 48, 4
_SHARES = (24, 8, 4, 2, 1)
"""Measured lengths, as divisors of the longest one."""
MAX_COST = 1024.0
"""Upper limit of the fixed cost, used if longer forwards take no longer, as on a large GPU."""


@torch.no_grad()
def measure_forward_cost(
    forward: Callable[[int], None], num_rows: int, max_positions: int | None = None
) -> ForwardCost:
    """Time forwards of several lengths.

    The fixed cost is a / b of the best-fitting line seconds = a + b * positions. The measured costs are returned too,
    since times are not linear: on CPUs a forward of one position takes as long as one of six.

    Args:
        forward: Runs body and head on ``num_rows`` rows of the given number of positions, and waits for the result.
        num_rows: Rows of the batch.
        max_positions: Maximum number of positions in a row, if the model has learnt them; ``None``: any number.

    Returns:
        The costs; the fixed one is in [0, ``MAX_COST``] positions a row.
    """
    longest = max(2, min(_LONGEST, _MAX_POSITIONS // num_rows))
    if max_positions is not None:
        longest = min(longest, max_positions)
    if longest < 2:
        return ForwardCost(0.0)
    lengths = sorted({-(-longest // share) for share in _SHARES})
    best = dict.fromkeys(lengths, float("inf"))
    for _ in range(1 + _NUM_REPEATS):  # the first run is a warm-up
        for length in lengths:
            started = time.perf_counter()
            forward(length)
            best[length] = min(best[length], time.perf_counter() - started)
    mean_length, mean_time = sum(lengths) / len(lengths), sum(best.values()) / len(lengths)
    covariance = sum((length - mean_length) * (best[length] - mean_time) for length in lengths)
    slope = covariance / sum((length - mean_length) ** 2 for length in lengths)
    fixed = max(mean_time - slope * mean_length, 0.0)
    unit = max(slope, fixed / MAX_COST, 1e-12)
    return ForwardCost(fixed / unit, tuple((length, seconds / unit) for length, seconds in best.items()))
