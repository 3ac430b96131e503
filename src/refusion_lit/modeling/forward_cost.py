"""How much of a forward's time does not depend on its length: measured, so that decoders can weigh forwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_MAX_POSITIONS = 256
_LONGEST, _NUM_REPEATS = 48, 4
MAX_COST = 1024.0
"""Where longer forwards take no longer, as on a large GPU."""


@torch.no_grad()
def measure_forward_cost(forward: Callable[[int], None], num_rows: int, max_positions: int | None = None) -> float:
    """Time forwards of several lengths, and fit seconds = a + b * positions a row.

    Args:
        forward: Runs body and head on ``num_rows`` rows of so many positions, and waits for the result.
        num_rows: Rows of the batch.
        max_positions: Most positions that the model can take in a row, if it has learnt them; ``None``: any number.

    Returns:
        a / b, the fixed cost in positions a row, in [0, ``MAX_COST``].
    """
    longest = max(2, min(_LONGEST, _MAX_POSITIONS // num_rows))
    if max_positions is not None:
        longest = min(longest, max_positions)
    if longest < 2:
        return 0.0
    # For few rows not one position: CPUs multiply a single vector in another way, and decoders weigh longer forwards.
    lengths = sorted({-(-longest // 12), -(-longest // 3), longest})
    best = dict.fromkeys(lengths, float("inf"))
    for _ in range(1 + _NUM_REPEATS):  # the first one warms up
        for length in lengths:
            started = time.perf_counter()
            forward(length)
            best[length] = min(best[length], time.perf_counter() - started)
    mean_length, mean_time = sum(lengths) / len(lengths), sum(best.values()) / len(lengths)
    covariance = sum((length - mean_length) * (best[length] - mean_time) for length in lengths)
    slope = covariance / sum((length - mean_length) ** 2 for length in lengths)
    fixed = mean_time - slope * mean_length
    if slope * MAX_COST <= fixed:
        return MAX_COST
    return max(fixed / slope, 0.0)
