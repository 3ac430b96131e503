"""Where drafting pays: the number of masks behind each possible acceptance that costs least time per token."""

from __future__ import annotations

from functools import lru_cache

_MAX_IMPROVEMENTS = 50
_LENGTH = 1000.0
"""Forwards of a text, so that every one ends: a plan may have parts that lead nowhere else."""


@lru_cache(maxsize=1024)
def draft_plan(
    fixed_cost: float, acceptance: float, num_masks: int, mask_cost: float = 0.0
) -> tuple[tuple[int, ...], ...]:
    """Return how many masks to put behind j accepted ones of d drafts, as ``plan[d][j]``.

    A forward that verifies d drafts costs ``fixed_cost + 1 + d`` positions; if it has masks, ``mask_cost`` and one for
    each of them. It commits j + 1 tokens if exactly the first j drafts are right, and the masks behind j become the
    next drafts. Each draft is right with the same probability, whatever came before. That is a Markov decision process
    whose state is d; policy iteration finds the plan of the lowest cost per token.

    Args:
        fixed_cost: Cost of a forward without masks and without its positions, in positions, at least 0.
        acceptance: Probability that a draft is right, in [0, 1].
        num_masks: Maximum number of masks behind one acceptance, at least 1.
        mask_cost: Cost of having masks at all, in positions, at least 0.

    Returns:
        Rows of d + 1 numbers for d from 0 to ``num_masks``; all zero behind d = 0 where drafts do not pay.
    """
    import torch  # not with the module: the help of commands describes decoders without it

    num_states = num_masks + 1
    drafts = torch.arange(num_states, dtype=torch.float64)
    right = drafts[None, :]  # axes: drafts, right ones
    chance = acceptance**right * torch.where(right < drafts[:, None], 1 - acceptance, 1.0)
    possible = right <= drafts[:, None]
    chance = torch.where(possible, chance, 0.0)
    num_tokens = (chance * (right + 1)).sum(1)
    plan = torch.zeros(num_states, num_states, dtype=torch.long)
    plan[0, 0] = num_masks  # draft and verify in turn
    for _ in range(_MAX_IMPROVEMENTS):
        masks = torch.where(possible, plan, 0).sum(1)
        follows = torch.zeros_like(chance).scatter_add_(1, plan, chance)
        # value = cost - rate * tokens + follows @ value, with value[0] = 0: solved for the rate and the other values.
        equations = torch.eye(num_states, dtype=torch.float64) - (1 - 1 / _LENGTH) * follows
        equations[:, 0] = num_tokens
        values = torch.linalg.solve(equations, fixed_cost + 1 + drafts + masks + mask_cost * (masks > 0))
        values[0] = 0.0
        options = drafts + chance[:, :, None] * values  # axes: drafts, right ones, masks
        saved = (options[:, :, 0] - options.amin(2)).sum(1)  # by having masks where they pay
        better = torch.where(saved[:, None] > mask_cost, options.argmin(2), 0)
        if torch.equal(better, plan):
            break
        plan = better
    return tuple(tuple(row[: d + 1]) for d, row in enumerate(plan.tolist()))
