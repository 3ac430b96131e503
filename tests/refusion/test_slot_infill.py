from __future__ import annotations

import pytest

from refusion_lit.engine.requests import Forward, Reading
from refusion_lit.refusion.infill import close_round, infill_autoregressively, infill_by_masks, slot_branch
from refusion_lit.refusion.slots import OpenSlot, SlotState
from refusion_lit.types import Prompt, SamplingParams
from support.fakes import EOS, SPECIAL

CONTEXT = 10
SIZE = 4


def make_state(slots: list[tuple[list[int], int]]) -> SlotState:
    """Return a state whose slots 0, 1, ... are open after a context, with their tokens and accepted prefixes."""
    places = [range(SIZE * i, SIZE * (i + 1)) for i in range(len(slots))]
    state = SlotState(
        Prompt(token_ids=(3,), id="p"),
        SamplingParams(temperature=0.7),
        SPECIAL,
        slots=places,
        blocks=[[*range(len(slots))]],
        num_cached=CONTEXT,
    )
    for i, (tokens, prefix) in enumerate(slots):
        state.open.append(OpenSlot(i, places[i], CONTEXT + SIZE * i, list(tokens), prefix))
        state.end_at_eos(state.open[i])
    return state


@pytest.mark.parametrize(
    ("prefix", "scores", "num_accepted"),
    [
        (1, [0.1, 0.1], 2),  # one regardless
        (1, [0.9, 0.5], 3),  # then strictly above
        (1, [0.5, 0.9], 2),
        (1, [0.9, 0.9], 4),
        (2, [0.6], 4),
        (3, [], 4),
        (4, [], 4),
    ],
)
def test_each_round_accepts_a_token_regardless(prefix: int, scores: list[float], num_accepted: int) -> None:
    state = make_state([([5, 6, 7, 8], prefix)])
    state.accept(state.open[0], scores, 0.5)
    assert state.open[0].num_accepted == num_accepted


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        ([2, 3], 1),  # the fewest, less the one whose output is needed next
        ([2, 4], 1),
        ([3, 4], 2),
        ([1, 4], 0),
    ],
)
def test_entries_of_the_common_length_are_final(prefixes: list[int], expected: int) -> None:
    state = make_state([([5, 6, 7, 8], prefix) for prefix in prefixes])
    close_round(state, packed=False)
    assert [slot.num_cached for slot in state.open] == [expected, expected]
    close_round(state, packed=True)
    assert [slot.num_cached for slot in state.open] == prefixes


def test_slots_after_an_eos_are_dropped_and_the_ended_one_delays_no_other() -> None:
    state = make_state([([5, 6, 7, 8], 3), ([5, EOS, EOS, 8], 3), ([EOS, 6, 7, 8], 2)])
    close_round(state, packed=False)
    assert [slot.number for slot in state.open] == [0, 1]
    first, last = state.open
    assert (last.tokens, last.num_accepted, last.ends, last.is_complete) == ([5, EOS], 2, True, True)
    assert not first.is_complete
    assert first.num_cached == 2
    for slot in state.open:
        state.accept(slot, [], 0.5)
    assert first.is_complete
    state.close()
    assert state.committed == [0, 1, 2, 3, 4, 5]
    assert state.num_cached == CONTEXT + 6
    assert state.finished


def test_an_end_that_is_only_proposed_ends_nothing() -> None:
    state = make_state([([5, 6, EOS, 8], 2), ([5, 6, 7, EOS], 3)])
    close_round(state, packed=False)
    assert [slot.ends for slot in state.open] == [False, False]


def test_an_open_slot_after_the_first_is_planned_again_though_it_ends() -> None:
    state = make_state([([5, 6, 7, 8], 4), ([5, 6, 7, 8], 3), ([EOS, 6, 7, 8], 1)])
    state.close()
    assert state.committed == [0, 1, 2, 3]
    assert state.blocks == [[1, 2]]


def test_entries_lie_where_the_branches_wrote_them() -> None:
    state = make_state([([5, 6, 7, 8], 4), ([5, 6, 7, 8], 4), ([5, EOS, 7, 8], 2)])
    written = []
    for slot in state.open:
        branch = slot_branch(state, slot)
        assert branch.visible[0] == (0, CONTEXT)
        assert list(branch.positions) == [1 + place for place in slot.places]
        written += range(branch.write_at, branch.write_at + len(branch.tokens))
    state.close()
    assert written == [*range(CONTEXT, state.num_cached)], "without gaps: nothing has to be moved"


def drive(state: SlotState, *, by_masks: bool, tokens: list[list[int]], scores: list[list[float]]) -> Forward:
    """Run one round of a single slot's infill; return its last forward."""
    steps = infill_by_masks(state, 0.5, packed=False) if by_masks else infill_autoregressively(state, 0.5)
    request = next(steps)
    for drawn, scored in zip(tokens, scores, strict=True):
        assert isinstance(request, Forward)
        [branch] = request.branches
        assert (len(branch.draft_at), len(branch.score_at)) == (len(drawn), len(scored))
        assert request.draw.sampling.temperature == 0, "infill is greedy"
        last = request
        try:
            request = steps.send([Reading(tokens=drawn, scores=scored)])
        except StopIteration:
            return last
    return last


def test_masks_propose_and_a_second_forward_verifies() -> None:
    state = make_state([([5, 6, 7, 8], 2)])
    last = drive(state, by_masks=True, tokens=[[3, 4], []], scores=[[], [0.75]])
    assert list(last.branches[0].tokens) == [5, 6, 3, 4]
    assert list(last.branches[0].score_at) == [(2, 4)]
    assert state.open[0].is_complete
    assert state.open[0].tokens == [5, 6, 3, 4]


def test_the_models_own_next_token_needs_no_probability() -> None:
    # The drafts fail, so the first forward only proposes; 9 is then the model's own choice after 5.
    state = make_state([([5, 6, 7, 8], 1)])
    rounds = [[9, 10, 11], [12, 13, 14], [3, 4], [7]]
    scores = [[0.5, 0.9, 0.9], [0.0, 0.5, 0.9], [0.0, 0.4], [0.0]]
    last = drive(state, by_masks=False, tokens=rounds, scores=scores)
    assert state.open[0].tokens == [5, 9, 13, 4]
    assert state.open[0].is_complete
    assert list(last.branches[0].tokens) == [13, 4]  # 5 and 9 are cached


def test_a_draft_that_passes_is_not_proposed_again() -> None:
    state = make_state([([5, 6, 7, 8], 1)])
    drive(state, by_masks=False, tokens=[[9, 10, 11]], scores=[[0.75, 0.75, 0.25]])
    assert state.open[0].tokens == [5, 6, 7, 11]
    assert state.open[0].num_accepted == 3
