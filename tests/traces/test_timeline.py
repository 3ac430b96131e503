"""The status of every token after every forward, against a slow search through the trace and by hand."""

from __future__ import annotations

import pytest

from refusion_lit.traces.document import Trace
from refusion_lit.traces.timeline import timeline
from traces.samples import PROMPT_LENGTH, entry, make_trace, plan_and_verify, random_trace


def find_status(trace: Trace, index: int, num_forwards: int) -> tuple[str, int | None, int] | None:
    """Return status, token and number of drafts of a response token after some forwards, by searching the trace."""
    position = PROMPT_LENGTH + index
    accepted_in = next((n for n, r in enumerate(trace.rounds) if position in r.accepted), None)
    last = len(trace.rounds) if accepted_in is None else accepted_in  # later drafts of the position do not count
    drafted_in = [n for n, r in enumerate(trace.rounds) if position in r.positions and n <= last]
    past = [n for n in drafted_in if n < num_forwards]
    tokens = [trace.rounds[n].tokens[[*trace.rounds[n].positions].index(position)] for n in past]
    if accepted_in is not None and accepted_in < num_forwards:
        drafted = tokens[-1] if tokens else None
        return "accepted", trace.token_ids[index] if index < len(trace.token_ids) else drafted, len(past)
    if not past:
        return None
    # A draft that is made again later has been rejected: by its own forward if that accepts without verifying, else by
    # the first later forward that accepts or verifies.
    again = next((n for n in drafted_in if n > past[-1]), None)
    if again is None:
        return "drafted", tokens[-1], len(past)
    own, *later = trace.rounds[past[-1] : min(num_forwards, again)]
    is_rejected = bool(own.accepted and not own.scores) or any(r.accepted or r.scores for r in later)
    return "rejected" if is_rejected else "drafted", tokens[-1], len(past)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_after_every_forward_is_what_a_search_finds(seed: int) -> None:
    trace = random_trace(seed)
    history = timeline(trace)
    for forwards in range(trace.num_forwards + 1):
        for index, change in enumerate(history.after(forwards)):
            actual = None if change is None else (change.status, change.token, change.num_drafts)
            assert actual == find_status(trace, index, forwards), (forwards, index)


def test_a_rejected_draft_is_rejected_from_its_verification_until_it_is_planned_again() -> None:
    history = timeline(plan_and_verify())
    changes = [history.after(n)[0] for n in range(1, 5)]
    assert [(change.status, change.token, change.num_drafts) for change in changes if change] == [
        ("drafted", 1, 1),
        ("rejected", 1, 1),
        ("drafted", 5, 2),
        ("accepted", 5, 2),
    ]
    assert history.final_forwards() == [4, 4, 2, 2, 0, 0]
    beyond = history.after(len(history.changes))[4]
    assert beyond is not None
    assert beyond.status == "drafted"


def test_drafts_of_a_forward_that_also_verifies_are_judged_by_a_later_one() -> None:
    trace = make_trace(
        [
            entry("plan", {0: 1, 1: 2}),
            entry("verify+plan", {1: 3}, accepted=[0], scores=[0.9]),
            entry("verify+plan", {1: 4}, scores=[0.1]),
            entry("verify", accepted=[1], scores=[0.9]),
        ],
        token_ids=(1, 4),
    )
    second = [timeline(trace).after(n)[1] for n in range(1, 5)]
    assert [(c.status, c.token) for c in second if c] == [
        ("drafted", 2),
        ("drafted", 3),
        ("drafted", 4),
        ("accepted", 4),
    ]


def test_a_forward_of_masked_diffusion_rejects_its_own_drafts_that_it_does_not_accept() -> None:
    trace = make_trace([entry("step", {0: 1, 1: 2}, [1]), entry("step", {0: 3}, [0])], token_ids=(3, 2))
    first, last = timeline(trace).after(1)[0], timeline(trace).after(trace.num_forwards)[0]
    assert first is not None
    assert last is not None
    assert (first.status, first.token) == ("rejected", 1)
    assert (last.status, last.token, last.probability) == ("accepted", 3, 0.5)


def test_the_probability_is_that_of_the_accepted_draft() -> None:
    rounds = [entry("plan", {0: 1}, probabilities=[0.9]), entry("plan", {0: 2}, probabilities=[0.4], accepted=[0])]
    accepted, unknown = (timeline(make_trace(rounds, token_ids=(token,))).after(len(rounds))[0] for token in (1, 9))
    assert accepted is not None
    assert unknown is not None
    assert accepted.probability == 0.9
    assert unknown.probability is None
    assert timeline(make_trace([])).canvas_length == 0
