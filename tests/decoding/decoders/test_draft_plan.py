from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.families.speculative.draft_plan import Plan, draft_plan
from refusion_lit.types import ForwardCost


def cost_per_token(plan: Plan, cost: ForwardCost, acceptance: float, mask_cost: float) -> float:
    """Positions per token in the long run, from the share of forwards that verify each number of drafts."""
    size = len(plan)
    follows, costs, tokens = np.zeros((size, size)), np.zeros(size), np.zeros(size)
    for drafts, masks in enumerate(plan):
        costs[drafts] = cost.of(1 + drafts + sum(masks)) - mask_cost * (not any(masks))
        for right, number in enumerate(masks):
            chance = acceptance**right * (1 if right == drafts else 1 - acceptance)
            follows[drafts, number] += chance
            tokens[drafts] += chance * (right + 1)
    share = np.eye(size)[0]
    for _ in range(12):  # 4096 forwards, a half-step at a time so that cycles die out
        follows = follows @ follows if _ else (follows + np.eye(size)) / 2
    share = share @ follows
    return float(share @ costs / (share @ tokens))


def same_everywhere(num_masks: int, *, verifying: int, drafting: int) -> Plan:
    """Plan with one number of masks after every acceptance, and another one in forwards that verify nothing."""
    return ((drafting,), *((verifying,) * (drafts + 1) for drafts in range(1, num_masks + 1)))


STEPS = ForwardCost(20, ((1, 30.0), (4, 22.0), (5, 38.0), (6, 38.0), (8, 60.0)))
"""As on processors that take some lengths at a time: not even ascending."""


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    ("cost", "mask_cost"),
    [(ForwardCost(2), 0), (ForwardCost(8), 2), (ForwardCost(30), 6), (ForwardCost(90), 60), (STEPS, 0), (STEPS, 5)],
)
def test_of_all_plans_none_costs_less(cost: ForwardCost, mask_cost: int, acceptance: float) -> None:
    found = cost_per_token(draft_plan(cost, acceptance, 2, mask_cost), cost, acceptance, mask_cost)
    plans = (((a,), (b, c), (d, e, f)) for a, b, c, d, e, f in product(range(3), repeat=6))
    assert found <= min(cost_per_token(plan, cost, acceptance, mask_cost) for plan in plans) * 1.001


@given(st.integers(0, 300), st.floats(0.05, 0.95), st.integers(1, 8), st.floats(0, 0.9), st.integers(0, 20))
def test_it_costs_no_more_than_any_fixed_layout(
    fixed: int, acceptance: float, num_masks: int, mask_share: float, free: int
) -> None:
    cost, mask_cost = ForwardCost(fixed, ((1 + free, fixed + 1.0), (2 + free, fixed + 2.0))), mask_share * fixed
    plan = draft_plan(cost, acceptance, num_masks, mask_cost)
    assert [len(row) for row in plan] == list(range(1, num_masks + 2))
    assert all(0 <= number <= num_masks for row in plan for number in row)
    found = cost_per_token(plan, cost, acceptance, mask_cost)
    for verifying, drafting in ((0, 0), (0, num_masks), (num_masks, num_masks)):
        other = same_everywhere(num_masks, verifying=verifying, drafting=drafting)
        assert found <= cost_per_token(other, cost, acceptance, mask_cost) * 1.001


@pytest.mark.parametrize(("fixed", "acceptance"), [(0, 0.9), (50, 0.0), (1, 0.5)])
def test_where_drafts_do_not_pay_there_are_none(fixed: int, acceptance: float) -> None:
    assert draft_plan(ForwardCost(fixed), acceptance, 4)[0] == (0,)


def test_positions_that_take_no_time_are_used() -> None:
    free = ForwardCost(10, ((1, 30.0), (9, 30.0), (10, 90.0), (40, 500.0)))
    plan = draft_plan(free, 0.6, 3)
    assert sum(plan[3]) == 9 - 4  # 3 drafts and their token leave room for 5 masks
    assert min(plan[3]) == 1


def test_where_all_drafts_are_right_all_masks_follow_them() -> None:
    plan = draft_plan(ForwardCost(100), 1.0, 5)
    assert plan[0] == (5,)
    assert plan[5] == (0, 0, 0, 0, 0, 5)
