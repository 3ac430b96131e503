"""Where drafting pays: the number of masks after each possible acceptance that costs least time per token."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from refusion_lit.types import ForwardCost

if TYPE_CHECKING:
    import numpy as np

_MAX_IMPROVEMENTS = 50
_LENGTH = 1000.0
"""Forwards of a text, so that every one ends: a plan may have parts that lead nowhere else."""

Plan = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def draft_plan(cost: ForwardCost, acceptance: float, num_masks: int, mask_cost: float = 0.0) -> Plan:
    """Return how many masks to put after j accepted ones of d drafts, as ``plan[d][j]``.

    A forward feeds a token, d drafts to verify and the masks. It commits j + 1 tokens if exactly the first j drafts are
    right, and the masks after j become the next drafts. Each draft is right with the same probability, whatever came
    before. That is a Markov decision process whose state is d; policy iteration finds the plan of the lowest cost per
    token.

    Args:
        cost: Of forwards with masks, by their positions.
        acceptance: Probability that a draft is right, in [0, 1].
        num_masks: Maximum number of masks after one acceptance, at least 1.
        mask_cost: What a forward without masks saves, in positions, at least 0.

    Returns:
        Rows of d + 1 numbers for d from 0 to ``num_masks``; all zero after d = 0 where drafts do not pay.
    """
    import numpy as np  # not with the module: the help of commands describes decoders without it

    num_states = num_masks + 1
    # axes: drafts, masks in total
    totals = range(num_states * num_masks + 1)
    costs = np.array([[cost.of(1 + d + total) for total in totals] for d in range(num_states)], dtype=float)
    costs[:, 0] -= mask_cost
    plan: Plan = ((num_masks,), *((0,) * (d + 1) for d in range(1, num_states)))  # draft and verify in turn
    for _ in range(_MAX_IMPROVEMENTS):
        better = _best_plan(costs, acceptance, _values(costs, acceptance, plan))
        if better == plan:
            break
        plan = better
    return plan


def _values(costs: np.ndarray, acceptance: float, plan: Plan) -> np.ndarray:
    """Return what d drafts in hand cost more than none, under a plan."""
    import numpy as np

    equations, spent, num_tokens = np.eye(len(plan)), np.zeros(len(plan)), np.zeros(len(plan))
    for d, masks in enumerate(plan):
        spent[d] = costs[d, sum(masks)]
        for j, number in enumerate(masks):
            chance = acceptance**j * (1 if j == d else 1 - acceptance)
            num_tokens[d] += chance * (j + 1)
            equations[d, number] -= (1 - 1 / _LENGTH) * chance
    # value = cost - rate * tokens + chances @ value, with value[0] = 0: solved for the rate and the other values.
    equations[:, 0] = num_tokens
    values = np.linalg.solve(equations, spent)
    values[0] = 0.0
    return values


def _best_plan(costs: np.ndarray, acceptance: float, values: np.ndarray) -> Plan:
    """Return the plan that is best if ``values`` are what its drafts cost later.

    A forward's cost depends on all its masks, so they are shared out by dynamic programming: ``least[total]`` is what
    so many masks after the first acceptances cost later, ``chosen`` how many of them stand after the last of these.
    """
    import numpy as np

    least, chosen, plan = np.where(np.arange(costs.shape[1]) == 0, 0.0, np.inf), [], []
    for d in range(len(values)):
        later, after_all = _shared_out(least, acceptance**d * values)
        total = int(np.argmin(costs[d] + later))
        masks = []
        for after in (after_all, *reversed(chosen)):
            masks.append(int(after[total]))
            total -= masks[-1]
        plan.append(tuple(reversed(masks)))
        least, after = _shared_out(least, acceptance**d * (1 - acceptance) * values)
        chosen.append(after)
    return tuple(plan)


def _shared_out(least: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least costs by total after one more acceptance, and the number of masks after it."""
    import numpy as np

    options = np.full((len(values), len(least)), np.inf)
    for number, value in enumerate(values):
        options[number, number:] = least[: len(least) - number] + value
    return options.min(0), options.argmin(0)
