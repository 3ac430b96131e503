"""Statistics of traces, by hand and against plain loops."""

from __future__ import annotations

import pytest

from refusion_lit.traces import TraceStatistics, trace_statistics
from traces.samples import PROMPT_LENGTH, entry, make_trace, plan_and_verify, random_trace


def test_by_hand() -> None:
    found = trace_statistics(plan_and_verify())
    assert found == TraceStatistics(
        num_tokens=4,
        num_forwards=4,
        acceptance_lengths=(2, 2),
        slots_per_round=(1, 1),
        num_slots=2,
        num_slots_out_of_order=1,
        num_drafts=8,
        num_replanned=2,
        forwards_by_phase={"plan": 2, "verify": 2},
    )
    assert found.share_out_of_order == 0.5
    assert found.tokens_per_forward == 1.0
    assert found.mean_acceptance_length == 2.0


def test_left_to_right_is_never_out_of_order() -> None:
    rounds = [entry("prefill", {0: 1}, [0]), entry("decode", {1: 2}, [1]), entry("decode", {2: 3}, [2])]
    found = trace_statistics(make_trace(rounds, token_ids=(1, 2, 3)))
    assert (found.num_slots, found.num_slots_out_of_order, found.mean_slots_per_round) == (3, 0, 1.0)


def test_slots_accepted_together_are_in_order_and_a_slot_after_an_open_one_is_not() -> None:
    together = make_trace([entry("a", {0: 1, 1: 2}, [0, 1])], token_ids=(1, 2))
    hole = make_trace([entry("a", {0: 1, 1: 2}, [1])])
    assert trace_statistics(together).num_slots_out_of_order == 0
    assert trace_statistics(hole).num_slots_out_of_order == 1


@pytest.mark.parametrize("seed", range(90))
def test_against_plain_loops(seed: int) -> None:
    trace = random_trace(seed)
    found = trace_statistics(trace)
    lengths, slots, phases = [], [], {}
    num_slots = out_of_order = num_drafts = num_replanned = 0
    final_at: dict[int, int] = {}
    drafted: dict[int, int] = {}
    for number, row in enumerate(trace.rounds):
        phases[row.phase] = phases.get(row.phase, 0) + 1
        for position in row.positions:
            if position not in final_at:
                drafted[position] = drafted.get(position, 0) + 1
        for position in row.accepted:
            final_at[position] = number
        if row.accepted:
            lengths.append(len(row.accepted))
            slots.append(len({(p - PROMPT_LENGTH) // trace.slot_size for p in row.accepted}))
    num_drafts += sum(drafted.values())
    num_replanned += sum(count - 1 for count in drafted.values())
    accepted_by = {}
    for position, number in final_at.items():
        slot = (position - PROMPT_LENGTH) // trace.slot_size
        accepted_by[slot] = max(accepted_by.get(slot, 0), number)
    for slot, number in accepted_by.items():
        num_slots += 1
        before = range(PROMPT_LENGTH, PROMPT_LENGTH + slot * trace.slot_size)
        out_of_order += any(p not in final_at or final_at[p] > number for p in before)
    assert found.acceptance_lengths == tuple(lengths)
    assert found.slots_per_round == tuple(slots)
    assert dict(found.forwards_by_phase) == phases
    assert (found.num_slots, found.num_slots_out_of_order) == (num_slots, out_of_order)
    assert (found.num_drafts, found.num_replanned) == (num_drafts, num_replanned)
    assert found.num_forwards == len(trace.rounds)
