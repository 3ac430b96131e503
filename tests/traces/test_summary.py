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
    lengths = []
    slots = []
    num_slots = out_of_order = num_drafts = num_replanned = 0
    final_at: dict[int, int] = {}
    drafted: dict[int, int] = {}
    for number, row in enumerate(trace.rounds):
        for position in row.positions:
            if position not in final_at:
                drafted[position] = drafted.get(position, 0) + 1
        for position in row.accepted:
            final_at[position] = number
        counted = [p for p in row.accepted if p < end]
        if counted:
            lengths.append(len(counted))
            slots.append(len({(p - PROMPT_LENGTH) // trace.slot_size for p in counted}))
    num_drafts += sum(drafted.values())
    num_replanned += sum(count - 1 for count in drafted.values())
    accepted_by = {}
    final_at = {position: number for position, number in final_at.items() if position < end}
    for position, number in final_at.items():
        slot = (position - PROMPT_LENGTH) // trace.slot_size
        accepted_by[slot] = max(accepted_by.get(slot, 0), number)
    for slot, number in accepted_by.items():
        num_slots += 1
        before = range(PROMPT_LENGTH, PROMPT_LENGTH + slot * trace.slot_size)
        out_of_order += any(p not in final_at or final_at[p] > number for p in before)
    of_slots = trace.slot_size > 1
    assert actual["tokens accepted at a time"] == f"{sum(lengths) / max(len(lengths), 1):.2f}"
    assert actual.get("slots filled at a time") == (f"{sum(slots) / max(len(slots), 1):.2f}" if of_slots else None)
    share = f"({100 * out_of_order / max(num_slots, 1):.0f} %)"
    assert (
        actual["slots out of order" if of_slots else "tokens out of order"] == f"{out_of_order} of {num_slots} {share}"
    )
    assert (actual["drafts"], actual["drafts rejected and drafted again"]) == (str(num_drafts), str(num_replanned))
    assert actual["forwards"] == str(len(trace.rounds))
