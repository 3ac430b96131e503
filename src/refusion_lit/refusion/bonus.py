"""ReFusion with bonus tokens: open slots are verified side by side, and every forward commits a token per slot.

If a draft is rejected, the model's own next token replaces it in the same forward: the bonus token of speculative
decoding. New drafts come from masks in the same forward, where masks pay. Otherwise they are guesses as in Jacobi
decoding: the model's choices after the rejected draft. Open slots do not see each other, so their cache entries equal
the entries of ReFusion's parallel infill. The text of a slot is the model's own greedy continuation of its first token:
drafts only decide how fast the text is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from refusion_lit.engine.branches import FEW_POSITIONS, Acceptance
from refusion_lit.engine.requests import Branch, Draw, MoreDrafts, Reading, Steps
from refusion_lit.refusion.infill import slot_branch, slots_to_feed
from refusion_lit.refusion.slots import OpenSlot, SlotState


@dataclass(kw_only=True)
class BonusState(SlotState):
    """State of ReFusion with bonus tokens. Slots stay open over several steps; their last tokens may lack proposals.

    Attributes:
        guessed: Numbers of open slots whose proposals are guesses, the model's choices after a rejected draft.
        acceptance: Acceptance of recent drafts by masks.
        guesses: Acceptance of recent guesses.
    """

    guessed: set[int] = field(default_factory=set)
    acceptance: Acceptance = field(default_factory=Acceptance)
    guesses: Acceptance = field(default_factory=Acceptance)


def step(
    state: BonusState, open_slots: Callable[[SlotState], Steps[None]], plan_branch: Callable[..., Branch], *,
    num_drafts: int | None, fused: bool,
) -> Steps[None]:  # fmt: skip
    """Verify all open slots' drafts; without open slots, open some and commit their first tokens.

    Args:
        state: Changed in place.
        open_slots: Chooses slots by a plan, perhaps made ahead, and opens them with the plan's drafts.
        plan_branch: Returns the branch that plans slots; the branch has no tokens if no slot is left.
        num_drafts: Maximum number of drafts per slot; ``None``: the rest of the slot.
        fused: Whether masks may follow drafts that are not yet verified.
    """
    if state.open and (yield from _advance(state, plan_branch, num_drafts, fused=fused)):
        return
    yield from open_slots(state)
    state.guessed = set()
    for slot in state.open:
        state.end_at_eos(slot)
    _commit_slots(state)
    _close(state)


def _advance(
    state: BonusState, plan_branch: Callable[..., Branch], num_drafts: int | None, *, fused: bool
) -> Steps[bool]:
    """Verify drafts in one forward; in the same forward, draft and plan where that may save a forward.

    Args:
        state: The prompt's state, with open slots.
        plan_branch: Makes the branch that plans the slots of a block.
        num_drafts: Maximum number of drafts per group of masks; ``None``: the rest of the slot.
        fused: Whether a forward that verifies may also draft and plan.

    Returns:
        Whether open slots got tokens; otherwise the forward only planned.
    """
    last = state.open[-1]
    end = last.write_at + len(state.slots[last.number])
    upcoming = state.blocks[0] if state.blocks else []
    masks = plan_branch(state, upcoming, num_seen=last.write_at + len(last.tokens), write_at=end)
    is_open = not all(slot.is_complete for slot in state.open)
    fed = slots_to_feed(state)
    groups = _mask_groups(state, end, num_drafts, fused=fused)
    num_masks = sum(len(branch.tokens) for branch in groups.values())
    is_few = num_masks <= FEW_POSITIONS
    branches = [_branch(state, slot) for slot in fed]
    branches += [branch if is_few else replace(branch, draft_at=()) for branch in groups.values()]
    plans = bool(masks.tokens) and _pays(state, len(masks.tokens), fused=fused)
    draw = state.draw
    # A plan may be sampled, but the model's own tokens are not. If a forward has both, the plan is read when it is
    # needed.
    is_sampled = draw.sampling.temperature > 0 and is_open
    token_draw = Draw(sampling=draw.sampling.greedy(), with_probability=False) if is_sampled else draw
    is_plan_read = token_draw is draw and (is_few or not is_open)
    if plans:
        plan = replace(masks, write_at=masks.write_at + num_masks, draft_at=masks.draft_at if is_plan_read else ())
        branches.append(plan)
    phase = "+".join(["verify"] * is_open + ["draft"] * bool(groups) + ["plan"] * plans)
    readings = yield state.forward(phase, branches, token_draw)
    planned = readings[-1]
    before = [(slot.number, slot.ends) for slot in state.open]
    accepted = [(slot, _accept_drafts(state, slot, reading)) for slot, reading in zip(fed, readings, strict=False)]
    _commit_slots(state)
    used = {(slot.number, number): slot for slot, number in accepted if slot in state.open and not slot.is_complete}
    used = {key: slot for key, slot in used.items() if key in groups}
    if used and not is_few:
        wanted = [branch.draft_at if key in used else () for key, branch in groups.items()]
        readings = yield MoreDrafts(draft_at=(*[()] * len(fed), *wanted, *[()] * plans), draw=token_draw)
    for key, reading in zip(groups, readings[len(fed) :], strict=False):
        if key in used:
            slot = used[key]
            slot.tokens[slot.num_accepted :] = reading.tokens
            state.guessed.discard(slot.number)
    is_unchanged = [(slot.number, slot.ends) for slot in state.open] == before  # no EOS that ends the text earlier
    if plans and _is_cached(state) and is_unchanged:
        if not is_plan_read:
            planned = (yield MoreDrafts(draft_at=(*[()] * (len(branches) - 1), masks.draft_at), draw=draw))[-1]
        state.planned = planned
    _close(state)
    return is_open


def _is_cached(state: BonusState) -> bool:
    """Whether all open slots are complete and in the cache; a bonus token at a slot's end is not in the cache."""
    return all(slot.num_cached == len(slot.places) for slot in state.open)


def _branch(state: BonusState, slot: OpenSlot) -> Branch:
    """Return the branch that feeds a slot's tokens that are not in the cache.

    Next tokens are read after the last accepted token and after all drafts, except after the slot's last token.
    """
    last = min(len(slot.tokens), len(slot.places) - 1)
    drawn = () if slot.is_complete else range(slot.num_accepted, last + 1)
    return slot_branch(state, slot, drawn=drawn, shift=1)


def _mask_groups(
    state: BonusState, write_at: int, num_drafts: int | None, *, fused: bool
) -> Mapping[tuple[int, int], Branch]:
    """Return the mask groups that save time, by slot and by the number of accepted drafts before the masks.

    A group's first mask stands at the place of the model's own token, and drafts nothing.

    Args:
        state: The prompt's state.
        write_at: Index of the first mask's cache entry.
        num_drafts: Maximum number of drafts per group; ``None``: the rest of the slot.
        fused: Whether slots with drafts get groups, too.
    """
    groups = {}
    incomplete = [slot for slot in state.open if not slot.is_complete]
    for slot in incomplete:
        cost = state.forward_cost / (state.num_rows * len(incomplete))  # rows and slots share a forward
        num_proposals = len(slot.tokens) - slot.num_accepted
        start = state.prompt_length + slot.places.start
        last = num_proposals if fused or num_proposals == 0 else -1
        for accepted in range(last + 1):
            place = slot.num_accepted + accepted
            most = len(slot.places) - place - 1
            most = most if num_drafts is None else min(most, num_drafts)
            number = _num_masks(state, slot, accepted, most, cost)
            if number == 0:
                continue
            groups[slot.number, accepted] = Branch(
                tokens=[state.mask_token_id] * (1 + number),
                positions=range(start + place, start + place + 1 + number),
                visible=((0, state.num_cached), (slot.write_at, slot.write_at + place)),
                write_at=write_at,
                draft_at=range(1, 1 + number),
            )
            write_at += 1 + number
    return groups


def _num_masks(state: BonusState, slot: OpenSlot, accepted: int, most: int, forward_cost: float) -> int:
    """Return how many masks to feed after ``accepted`` accepted drafts to save most time; 0 if masks save none.

    Without masks, guesses are the slot's next drafts. A forward gives 1 + E tokens if E of its drafts are accepted on
    average, so masks save forwards if more of their drafts are accepted. Costs are in positions: a forward costs a
    fixed number and about as many positions as this forward. The saving, times the probability that exactly
    ``accepted`` drafts are accepted, must exceed the number of masks.

    Args:
        state: The prompt's state.
        slot: The slot.
        accepted: Number of the slot's drafts that are accepted in this case.
        most: Maximum number of drafts.
        forward_cost: Fixed cost of a forward, in positions.
    """
    rate = _acceptance(state, slot).rate
    num_drafts = len(slot.tokens) - slot.num_accepted
    is_rejected = accepted < num_drafts
    chance = rate**accepted * (1 - rate if is_rejected else 1)
    num_guesses = num_drafts - accepted - is_rejected
    guesses = sum(state.guesses.rate**k for k in range(1, num_guesses + 1))
    drafts = 0.0
    best = (0.0, 0)
    for number in range(1, most + 1):
        drafts += state.acceptance.rate**number
        cost = forward_cost + 2 + num_drafts + number
        saved = chance * cost * (1 / (1 + guesses) - 1 / (1 + drafts))
        best = max(best, (saved - 1 - number, number))
    return best[1]


def _acceptance(state: BonusState, slot: OpenSlot) -> Acceptance:
    """Return the acceptance of recent drafts from the same source as a slot's drafts."""
    return state.guesses if slot.number in state.guessed else state.acceptance


def _accept_drafts(state: BonusState, slot: OpenSlot, reading: Reading) -> int:
    """Accept drafts up to the first wrong draft, replace this draft by the model's token, and return the number.

    The model's choices after its own token are the slot's next drafts until there are better drafts.
    """
    if slot.is_complete:  # its last token was not cached yet
        slot.num_cached = slot.num_accepted
        return 0
    drafts = slot.tokens[slot.num_accepted :]
    pairs = zip(drafts, reading.tokens, strict=False)
    accepted = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
    _acceptance(state, slot).count(accepted + 1, min(accepted + 1, len(drafts)), accepted)
    slot.num_cached = slot.num_accepted + accepted
    following = reading.tokens[accepted:]  # empty after a slot's last token
    slot.num_accepted = slot.num_cached + bool(following)
    slot.tokens[slot.num_cached :] = following
    state.guessed.add(slot.number)
    state.end_at_eos(slot)
    slot.num_cached = min(slot.num_cached, slot.num_accepted)
    return accepted


def _pays(state: BonusState, num_masks: int, *, fused: bool) -> bool:
    """Whether to append a plan's masks, which are valid only if the forward completes and caches all slots."""
    incomplete = [slot for slot in state.open if not slot.is_complete]
    if not incomplete:
        return True
    if not fused or any(len(slot.tokens) < len(slot.places) for slot in incomplete):
        return False
    chance = prod(_acceptance(state, slot).rate ** (len(slot.tokens) - slot.num_accepted) for slot in incomplete)
    return chance * state.forward_cost / state.num_rows > (1 - chance) * num_masks


def _commit_slots(state: BonusState) -> None:
    """Drop the open slots after an EOS, and commit the other slots' newly accepted tokens."""
    state.drop_after_end()
    for slot in state.open:
        new = [i for i in range(slot.num_accepted) if state.is_masked[slot.places[i]]]
        state.commit([slot.places[i] for i in new], [slot.tokens[i] for i in new])


def _close(state: BonusState) -> None:
    """Close the open slots once all are complete and cached; the response's last slots need no cache."""
    state.blocks = state.remaining_blocks(state.open, ends=state.open[-1].ends)
    is_last = not state.blocks and all(slot.is_complete for slot in state.open)
    if is_last or _is_cached(state):
        state.num_cached += sum(len(slot.tokens) for slot in state.open)
        state.open = []
        state.finished = not state.blocks
