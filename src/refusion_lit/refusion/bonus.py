"""Infill with bonus tokens: open slots are verified side by side, and each forward commits a token of every slot.

Where a draft is rejected, the model's own next token of the same forward takes its place, as after a verification in
speculative decoding. The model's choices after the rejected draft are the next drafts, as in Jacobi decoding. Slots do
not see each other while they are open, so their cache entries are those of ReFusion's parallel infill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps
from refusion_lit.refusion.infill import OpenSlot, SlotInfill
from refusion_lit.refusion.slots import Plan, ReFusionState


def open_slots(state: ReFusionState, chosen: Sequence[int], tokens: Sequence[int]) -> None:
    """Open slots: commit their first tokens; all others are drafts.

    Args:
        state: Changed in place.
        chosen: Numbers of the slots, in text order.
        tokens: Their drafts, slot by slot.
    """
    slots = []
    for index, (slot, bounds) in enumerate(zip(chosen, pairwise(state.bounds(chosen)), strict=True)):
        start = state.prompt_length + state.slots[slot].start
        slots.append(OpenSlot(start, index, list(tokens[slice(*bounds)]), num_accepted=1))
    infill = SlotInfill(state, slots, state.context_length, chosen, packed=True)
    _commit(state, infill, [0] * len(slots))
    state.remaining = [slot for slot in state.remaining if slot not in chosen]
    _close(state, infill)


def advance(
    state: ReFusionState, infill: SlotInfill, masks: Branch, upcoming: list[int], token_threshold: float, draw: Draw,
    *, fused: bool,
) -> Steps[int]:  # fmt: skip
    """Verify the drafts of all open slots in one forward, and plan in it where that may save a forward.

    Args:
        state: Changed in place.
        infill: The open slots, changed in place.
        masks: Branch that plans the slots after the open ones; see :func:`cache_end`.
        upcoming: Numbers of these slots; empty if none is left.
        token_threshold: Drafts above it are accepted, and the model's own choices.
        draw: How a plan is drawn. The model's own tokens are greedy.
        fused: Whether a plan may be made before all drafts are known to be accepted.

    Returns:
        How many drafts were verified; with none, the forward only planned.
    """
    fed = [slot for slot in infill.slots if slot.num_cached < _num_fed(slot)]
    branches = [_branch(infill, slot) for slot in fed]
    num_drafts = sum(_num_fed(slot) - slot.num_accepted for slot in infill.slots)
    plans = bool(upcoming) and _pays(state, num_drafts, len(masks.tokens), fused=fused)
    if plans:
        # A plan may be sampled, the model's own tokens are not: with both, the plan is read once it is needed.
        branches.append(replace(masks, draft_at=()) if num_drafts else masks)
    phase = "plan" if not num_drafts else "verify+plan" if plans else "verify"
    own = Draw(sampling=state.sampling.greedy(), with_probability=False)
    readings = yield Forward(phase=phase, branches=tuple(branches), draw=own if num_drafts else draw, packed=True)
    before = [slot.num_accepted for slot in infill.slots]
    had_eos = infill.found_eos
    for slot, reading in zip(fed, readings, strict=False):
        tested, accepted = _accept(slot, reading, token_threshold)
        state.num_tested += tested
        state.num_accepted += accepted
    infill.drop_after_end()
    _commit(state, infill, before)
    if plans and _is_cached(infill) and infill.found_eos == had_eos:
        if num_drafts:
            readings = yield MoreDrafts(draft_at=(*[()] * len(fed), masks.draft_at), draw=draw)
        state.planned = Plan(upcoming, 0, len(branches), readings[-1])
    _close(state, infill)
    return num_drafts


def cache_end(infill: SlotInfill) -> int:
    """Return the cache index after the open slots, which lie one after the other; nothing follows an EOS."""
    return infill.cache_index(infill.slots[-1]) + _num_fed(infill.slots[-1])


def _num_fed(slot: OpenSlot) -> int:
    """Return how many of a slot's tokens are fed or cached: with drafts if it is incomplete."""
    return slot.num_accepted if slot.is_complete else len(slot.tokens)


def _is_cached(infill: SlotInfill) -> bool:
    """Whether all slots are complete and in the cache; a bonus token at the end of a slot is not."""
    return infill.is_done and all(slot.num_cached == slot.num_accepted for slot in infill.slots)


def _branch(infill: SlotInfill, slot: OpenSlot) -> Branch:
    """Return the branch that feeds what is not cached of a slot, and reads the next token after all but its drafts."""
    tokens = slot.tokens[slot.num_cached : _num_fed(slot)]
    offsets = [place - 1 - slot.num_cached for place in range(slot.num_accepted, _num_fed(slot))]
    scores = [(offset, tokens[offset + 1]) for offset in offsets]
    return infill.branch(slot, tokens, draft_at=offsets, score_at=scores, shift=1)


def _accept(slot: OpenSlot, reading: Reading, threshold: float) -> tuple[int, int]:
    """Accept drafts up to the first rejected one, which the model's choice replaces; return tested and accepted ones.

    A draft is accepted if its probability is above the threshold, or if it is the model's choice.
    """
    drafts = slot.tokens[slot.num_accepted : _num_fed(slot)]
    if not drafts:
        slot.num_cached = slot.num_accepted
        return 0, 0
    accepts = [
        score > threshold or choice == draft
        for draft, choice, score in zip(drafts, reading.tokens, reading.scores, strict=True)
    ]
    accepted = [*accepts, False].index(False)
    slot.num_cached = slot.num_accepted + accepted
    slot.tokens[slot.num_cached :] = reading.tokens[accepted:]
    slot.num_accepted = min(slot.num_cached + 1, len(slot.tokens))
    return min(accepted + 1, len(drafts)), accepted


def _commit(state: ReFusionState, infill: SlotInfill, before: Sequence[int]) -> None:
    """Commit what was accepted of each slot since it had ``before`` accepted tokens."""
    for slot, start in zip(infill.slots, before, strict=False):  # slots after an EOS were dropped
        first = slot.start - state.prompt_length
        state.commit(range(first + start, first + slot.num_accepted), slot.tokens[start : slot.num_accepted])


def _pays(state: ReFusionState, num_drafts: int, num_masks: int, *, fused: bool) -> bool:
    """Whether to append the masks of a plan to a verification: the plan is valid only if all drafts are accepted."""
    if not num_drafts:
        return True
    acceptance = (state.num_accepted + 2) / (state.num_tested + 4)
    chance = acceptance**num_drafts if fused else 0.0
    return chance * state.forward_cost / state.num_rows > (1 - chance) * num_masks


def _close(state: ReFusionState, infill: SlotInfill) -> None:
    """Close the open slots once all are complete and cached, or nothing is left to see them."""
    state.remaining = state.left(infill.taken, ends=infill.found_eos)
    is_last = infill.is_done and not state.upcoming(infill.taken, ends=infill.found_eos)
    state.infill = infill
    if is_last or _is_cached(infill):
        state.context_length = cache_end(infill)
        state.infill = None
    state.finished = state.infill is None and state.is_filled
