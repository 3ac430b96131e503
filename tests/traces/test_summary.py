"""Statistics of traces, by hand and against plain loops."""

from __future__ import annotations

import pytest

from refusion_lit.traces.timeline import trace_statistics
from traces.samples import PROMPT_LENGTH, entry, make_trace, plan_and_verify, random_trace


def test_by_hand() -> None:
    actual = trace_statistics(plan_and_verify())
    assert actual == {
        "tokens": "4",
        "forwards": "4",
        "tokens per forward": "1.00",
        "tokens accepted at a time": "2.00",
        "slots filled at a time": "1.00",
        "slots out of order": "1 of 2 (50 %)",
        "drafts": "8",
        "drafts rejected and drafted again": "2",
    }


def test_left_to_right_is_never_out_of_order() -> None:
    rounds = [entry("prefill", {0: 1}, [0]), entry("decode", {1: 2}, [1]), entry("decode", {2: 3}, [2])]
    actual = trace_statistics(make_trace(rounds, token_ids=(1, 2, 3)))
    assert actual["tokens out of order"] == "0 of 3 (0 %)"
    assert "slots filled at a time" not in actual


def test_slots_accepted_together_are_in_order_and_a_slot_after_an_open_one_is_not() -> None:
    together = make_trace([entry("a", {0: 1, 1: 2}, [0, 1])], token_ids=(1, 2))
    hole = make_trace([entry("a", {0: 1, 1: 2}, [1])], token_ids=(1, 2))
    actual = [trace_statistics(trace)["tokens out of order"] for trace in (together, hole)]
    assert actual == ["0 of 2 (0 %)", "1 of 1 (100 %)"]


@pytest.mark.parametrize("seed", range(90))
def test_against_plain_loops(seed: int) -> None:
    trace = random_trace(seed)
    actual = trace_statistics(trace)
    end = PROMPT_LENGTH + len(trace.token_ids)
    nums_tokens, nums_slots = [], []  # that are accepted at a time
    final_at: dict[int, int] = {}  # the round that accepts a position
    num_drafts: dict[int, int] = {}  # of a position
    for number, row in enumerate(trace.rounds):
        for position in row.positions:
            if position not in final_at:
                num_drafts[position] = num_drafts.get(position, 0) + 1
        for position in row.accepted:
            final_at[position] = number
        counted = [p for p in row.accepted if p < end]
        if counted:
            nums_tokens.append(len(counted))
            nums_slots.append(len({(p - PROMPT_LENGTH) // trace.slot_size for p in counted}))
    accepted_by: dict[int, int] = {}  # the last round that accepts a token of a slot
    final_at = {position: number for position, number in final_at.items() if position < end}
    for position, number in final_at.items():
        slot = (position - PROMPT_LENGTH) // trace.slot_size
        accepted_by[slot] = max(accepted_by.get(slot, 0), number)
    num_out_of_order = 0
    for slot, number in accepted_by.items():
        before = range(PROMPT_LENGTH, PROMPT_LENGTH + slot * trace.slot_size)
        num_out_of_order += any(p not in final_at or final_at[p] > number for p in before)
    assert actual["tokens accepted at a time"] == f"{sum(nums_tokens) / max(len(nums_tokens), 1):.2f}"
    num_slots = len(accepted_by)
    out_of_order = f"{num_out_of_order} of {num_slots} ({100 * num_out_of_order / max(num_slots, 1):.0f} %)"
    if trace.slot_size > 1:
        assert actual["slots filled at a time"] == f"{sum(nums_slots) / max(len(nums_slots), 1):.2f}"
        assert actual["slots out of order"] == out_of_order
    else:
        assert "slots filled at a time" not in actual
        assert actual["tokens out of order"] == out_of_order
    assert actual["drafts"] == str(sum(num_drafts.values()))
    assert actual["drafts rejected and drafted again"] == str(sum(number - 1 for number in num_drafts.values()))
    assert actual["forwards"] == str(len(trace.rounds))
