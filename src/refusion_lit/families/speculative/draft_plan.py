"""Draft planning: chooses the number of masks after each possible acceptance to minimise the time per token."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from refusion_lit.types import ForwardCost

if TYPE_CHECKING:
    import numpy as np

_MAX_IMPROVEMENTS = 50
_LENGTH = 1000.0
"""Assumed number of forwards of a text. A finite number, since a plan may have states that it never leaves."""

Plan = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def draft_plan(cost: ForwardCost, acceptance: float, num_masks: int, mask_cost: float = 0.0) -> Plan:
    """Return how many masks to put after j accepted ones of d drafts, as ``plan[d][j]``.

    A forward feeds a token, d drafts to verify and the masks. It commits j + 1 tokens if exactly the first j drafts are
    right, and the masks after j become the next drafts. Each draft is assumed right with the same probability,
    independently of the others. This is a Markov decision process with state d; policy iteration finds the plan with
    the lowest cost per token.

    Args:
        cost: Cost of forwards with masks as a function of their positions.
        acceptance: Probability that a draft is right, in [0, 1].
        num_masks: Maximum number of masks after one acceptance, at least 1.
        mask_cost: Saving of a forward without masks in positions, at least 0.

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
    """Return the future cost of having d drafts relative to none, for each d, under a plan."""
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
    """Return the best plan if ``values`` are the future costs of its drafts (policy improvement).

    A forward's cost depends on its total number of masks, so dynamic programming distributes them over the acceptances:
    ``least[total]`` is the lowest future cost of ``total`` masks after the acceptances considered so far, and
    ``chosen`` the number of masks after the last of these.
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
    """Add one more acceptance: return the lowest costs by total number of masks, and the masks after it for each."""
    import numpy as np

    options = np.full((len(values), len(least)), np.inf)
    for number, value in enumerate(values):
        options[number, number:] = least[: len(least) - number] + value
    return options.min(0), options.argmin(0)
