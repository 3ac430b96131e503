from __future__ import annotations

import pytest

from fakes import EOS, SPECIAL
from refusion_lit.engine.requests import Forward, Reading
from refusion_lit.refusion.bonus import infill_autoregressively
from refusion_lit.refusion.infill import OpenSlot, SlotInfill, infill_by_masks
from refusion_lit.refusion.slots import ReFusionState
from refusion_lit.types import Prompt, SamplingParams

CONTEXT = 10
SIZE = 4


def infill_of(slots: list[tuple[list[int], int]]) -> SlotInfill[OpenSlot]:
    """Return slots 0, 1, ... with their tokens and accepted prefixes, after a context."""
    return SlotInfill(
        slots=[
            OpenSlot(i, 100 + SIZE * i, CONTEXT + SIZE * i, list(tokens), prefix)
            for i, (tokens, prefix) in enumerate(slots)
        ],
        state=ReFusionState(
            Prompt(token_ids=(3,), id="p"),
            SamplingParams(temperature=0.7),
            SPECIAL,
            slots=[],
            blocks=[],
            num_cached=CONTEXT,
        ),
    )


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
    slot = OpenSlot(0, 100, CONTEXT, [5, 6, 7, 8], prefix)
    slot.accept(scores, 0.5)
    assert slot.num_accepted == num_accepted


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        ([2, 3], 1),  # the fewest, less the one whose output is needed next
        ([2, 4], 1),
        ([3, 4], 2),
        ([1, 4], 0),
        ([4, 4], 4),  # all complete
    ],
)
def test_entries_of_the_common_length_are_final(prefixes: list[int], expected: int) -> None:
    infill = infill_of([([5, 6, 7, 8], prefix) for prefix in prefixes])
    infill.close_round()
    assert [slot.num_cached for slot in infill.slots] == [expected, expected]
    assert infill.is_done == (prefixes == [4, 4])


def test_slots_after_an_eos_are_dropped_and_the_ended_one_delays_no_other() -> None:
    infill = infill_of([([5, 6, 7, 8], 3), ([5, EOS, EOS, 8], 3), ([EOS, 6, 7, 8], 2)])
    infill.close_round()
    assert infill.taken == [0, 1]
    assert infill.slots[1].ends
    assert infill.slots[1].num_accepted == 2
    assert infill.found_eos
    assert not infill.is_done
    assert infill.slots[0].num_cached == 2
    for slot in infill.slots:
        slot.accept([], 0.5)
    infill.close_round()
    assert infill.is_done
    assert infill.kept_indices() == [10, 11, 12, 13, 14, 15]


def test_an_end_that_is_only_proposed_ends_nothing() -> None:
    infill = infill_of([([5, 6, EOS, 8], 2), ([5, 6, 7, EOS], 3)])
    infill.close_round()
    assert len(infill.slots) == 2
    assert not infill.found_eos


def test_kept_entries_lie_where_the_branches_wrote_them() -> None:
    infill = infill_of([([5, 6, 7, 8], 4), ([5, 6, 7, 8], 4), ([5, EOS, 7, 8], 2)])
    written = []
    for slot in infill.slots:
        branch = infill.branch(slot, slot.tokens)
        assert branch.visible[0] == (0, CONTEXT)
        assert list(branch.positions) == [slot.start + i for i in range(SIZE)]
        written.append(list(range(branch.write_at, branch.write_at + SIZE)))
    assert infill.kept_indices() == [*written[0], *written[1], *written[2][:2]]


def drive(
    infill: SlotInfill[OpenSlot], *, by_masks: bool, tokens: list[list[int]], scores: list[list[float]]
) -> Forward:
    """Run one round of a single slot's infill; return its last forward."""
    steps = (infill_by_masks if by_masks else infill_autoregressively)(infill, 0.5)
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
    infill = infill_of([([5, 6, 7, 8], 2)])
    last = drive(infill, by_masks=True, tokens=[[3, 4], []], scores=[[], [0.75]])
    assert list(last.branches[0].tokens) == [5, 6, 3, 4]
    assert list(last.branches[0].score_at) == [(2, 4)]
    assert infill.is_done
    assert infill.slots[0].tokens == [5, 6, 3, 4]


def test_the_models_own_next_token_needs_no_probability() -> None:
    # The drafts fail, so the first forward only proposes; 9 is then the model's own choice after 5.
    infill = infill_of([([5, 6, 7, 8], 1)])
    rounds = [[9, 10, 11], [12, 13, 14], [3, 4], [7]]
    scores = [[0.5, 0.9, 0.9], [0.0, 0.5, 0.9], [0.0, 0.4], [0.0]]
    last = drive(infill, by_masks=False, tokens=rounds, scores=scores)
    assert infill.slots[0].tokens == [5, 9, 13, 4]
    assert infill.is_done
    assert list(last.branches[0].tokens) == [13, 4]  # 5 and 9 are cached


def test_a_draft_that_passes_is_not_proposed_again() -> None:
    infill = infill_of([([5, 6, 7, 8], 1)])
    drive(infill, by_masks=False, tokens=[[9, 10, 11]], scores=[[0.75, 0.75, 0.25]])
    assert infill.slots[0].tokens == [5, 6, 7, 11]
    assert infill.slots[0].num_accepted == 3
