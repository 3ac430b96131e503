"""Infilling of ReFusion's open slots: how many tokens a round accepts, and what stays in the cache."""

from __future__ import annotations

import pytest

from refusion_lit.engine.requests import Forward, Reading
from refusion_lit.refusion.infill import close_round, infill_autoregressively, infill_by_masks, slot_branch
from refusion_lit.refusion.slots import OpenSlot, SlotState
from refusion_lit.types import Prompt, SamplingParams
from support.fakes import EOS, SPECIAL

CONTEXT = 10
"""Number of cached tokens before the slots."""
SIZE = 4
"""Size of a slot."""


def make_state(slots: list[tuple[list[int], int]]) -> SlotState:
    """Return a state whose slots are all open, after a context.

    Args:
        slots: For each slot its four tokens, and how many of them, from the left, are accepted.
    """
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
        pytest.param(1, [0.1, 0.1], 2, id="the next token is accepted without a score"),
        pytest.param(1, [0.9, 0.5], 3, id="a score at the threshold is refused"),
        pytest.param(1, [0.5, 0.9], 2, id="nothing is accepted after a refused token"),
        pytest.param(1, [0.9, 0.9], 4, id="both scores are above the threshold"),
        pytest.param(2, [0.6], 4, id="two tokens left"),
        pytest.param(3, [], 4, id="one token left"),
        pytest.param(4, [], 4, id="complete"),
    ],
)
def test_a_round_accepts_the_next_token_and_further_tokens_above_the_threshold(
    prefix: int, scores: list[float], num_accepted: int
) -> None:
    """The threshold is 0.5; ``scores`` are the probabilities of the tokens after the next token."""
    state = make_state([([5, 6, 7, 8], prefix)])
    state.accept(state.open[0], scores, 0.5)
    assert state.open[0].num_accepted == num_accepted


@pytest.mark.parametrize(("prefixes", "num_cached"), [([2, 3], 1), ([2, 4], 1), ([3, 4], 2), ([1, 4], 0)])
def test_the_reference_layout_caches_equally_many_tokens_of_all_slots(prefixes: list[int], num_cached: int) -> None:
    """The slot with the fewest accepted tokens decides; its last accepted token is fed again for its output.

    In the packed layout all accepted tokens are cached.
    """
    state = make_state([([5, 6, 7, 8], prefix) for prefix in prefixes])
    close_round(state, packed=False)
    assert [slot.num_cached for slot in state.open] == [num_cached, num_cached]
    close_round(state, packed=True)
    assert [slot.num_cached for slot in state.open] == prefixes


def test_slots_after_an_accepted_eos_token_are_dropped() -> None:
    """The slot with the EOS token is complete, although it is short, and does not hold back the slot before it."""
    state = make_state([([5, 6, 7, 8], 3), ([5, EOS, EOS, 8], 3), ([EOS, 6, 7, 8], 2)])
    close_round(state, packed=False)
    assert [slot.number for slot in state.open] == [0, 1]
    first, last = state.open
    assert (last.tokens, last.num_accepted) == ([5, EOS], 2)
    assert last.ends
    assert last.is_complete
    assert not first.is_complete
    assert first.num_cached == 2
    for slot in state.open:
        state.accept(slot, [], 0.5)
    assert first.is_complete
    state.close()
    assert state.committed == [0, 1, 2, 3, 4, 5]
    assert state.num_cached == CONTEXT + 6
    assert state.finished


def test_an_eos_token_that_is_not_accepted_ends_no_slot() -> None:
    state = make_state([([5, 6, EOS, 8], 2), ([5, 6, 7, EOS], 3)])
    close_round(state, packed=False)
    assert [slot.ends for slot in state.open] == [False, False]


def test_slots_after_the_first_incomplete_slot_are_planned_again() -> None:
    """Slot 1 is incomplete, so slot 2 is not committed, although it ends the text."""
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


def run_round(state: SlotState, *, by_masks: bool, tokens: list[list[int]], scores: list[list[float]]) -> Forward:
    """Run one round of infilling a single slot; return its last forward pass.

    Args:
        state: The state, with one open slot.
        by_masks: Whether masks draft tokens; otherwise the slot is filled autoregressively.
        tokens: The tokens that the model draws, by forward pass.
        scores: The scores that the model returns, by forward pass.
    """
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


def test_masks_draft_and_a_second_forward_pass_verifies() -> None:
    state = make_state([([5, 6, 7, 8], 2)])
    last = run_round(state, by_masks=True, tokens=[[3, 4], []], scores=[[], [0.75]])
    assert list(last.branches[0].tokens) == [5, 6, 3, 4]
    assert list(last.branches[0].score_at) == [(2, 4)]
    assert state.open[0].is_complete
    assert state.open[0].tokens == [5, 6, 3, 4]


def test_an_autoregressive_infill_takes_the_models_choice_after_a_refused_draft() -> None:
    # The drafts 6, 7, 8 are refused; in the first forward pass 9 is the model's choice after 5.
    state = make_state([([5, 6, 7, 8], 1)])
    rounds = [[9, 10, 11], [12, 13, 14], [3, 4], [7]]
    scores = [[0.5, 0.9, 0.9], [0.0, 0.5, 0.9], [0.0, 0.4], [0.0]]
    last = run_round(state, by_masks=False, tokens=rounds, scores=scores)
    assert state.open[0].tokens == [5, 9, 13, 4]
    assert state.open[0].is_complete
    assert list(last.branches[0].tokens) == [13, 4]  # 5 and 9 are cached


def test_a_draft_that_passes_is_not_proposed_again() -> None:
    state = make_state([([5, 6, 7, 8], 1)])
    run_round(state, by_masks=False, tokens=[[9, 10, 11]], scores=[[0.75, 0.75, 0.25]])
    assert state.open[0].tokens == [5, 6, 7, 11]
    assert state.open[0].num_accepted == 3
