"""Infill by next-token predictions: autoregressive, or with bonus tokens.

With bonus tokens, open slots are verified side by side, and each forward commits a token of every slot. Where a draft
is rejected, the model's own next token of the same forward takes its place, as after a verification in speculative
decoding. New drafts are masks' in the same forward, after those acceptances that are worth the masks, or guesses: the
model's choices after the rejected draft, as in Jacobi decoding.
Slots do not see each other while they are open, so their cache entries are those of ReFusion's parallel infill. The
text of a slot is the model's own greedy continuation of its first token: drafts decide only how fast it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from refusion_lit.engine.drafting import FEW_POSITIONS, Acceptance
from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Reading, Steps
from refusion_lit.refusion.infill import OpenSlot, SlotInfill, opened
from refusion_lit.refusion.slots import ReFusionState
from refusion_lit.utils.require import require


@dataclass(slots=True)
class DraftedSlot(OpenSlot):
    """An open slot with drafts after its accepted prefix.

    Attributes:
        num_drafts: How many tokens after the accepted prefix are drafts; the rest is undefined.
        is_guessed: Whether these are the model's choices after a rejected draft, not masks'.
    """

    num_drafts: int = 0
    is_guessed: bool = False

    @property
    def end(self) -> int:
        """Cache index after its last token."""
        return self.write_at + len(self.tokens)

    @property
    def num_fed(self) -> int:
        """Tokens that are fed or cached: the accepted ones, and drafts of an open slot."""
        return self.num_accepted + (0 if self.is_complete else self.num_drafts)

    @property
    def fed_end(self) -> int:
        """Cache index after the last of these."""
        return self.write_at + self.num_fed

    def propose(self, drafts: Sequence[int], *, guessed: bool = False) -> None:
        """Take drafts of the tokens after the accepted prefix."""
        self.num_drafts = len(drafts)
        self.is_guessed = guessed
        self.tokens[self.num_accepted : self.num_accepted + self.num_drafts] = drafts


@dataclass(kw_only=True)
class BonusState(ReFusionState):
    """State of ReFusion with bonus tokens.

    Attributes:
        infill: The open slots, which stay open over several steps.
        acceptance: How many recent drafts of masks were accepted.
        guesses: How many recent guesses were accepted: the model's choices after a rejected draft.
    """

    infill: SlotInfill[DraftedSlot] | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    guesses: Acceptance = field(default_factory=Acceptance)


def check_options(infill: str, token_threshold: float, num_drafts: int | None) -> None:
    """Refuse a low threshold with bonus tokens, and their number of drafts without them."""
    if infill == "bonus":
        fix = "raise it, or use another infill"
        require(token_threshold >= 0.5, "token_threshold", "at least 0.5 with infill 'bonus'", token_threshold, fix)
    else:
        require(
            num_drafts is None, "num_drafts", "null without infill 'bonus'", num_drafts, "leave it out, or set infill"
        )


def infill_autoregressively(infill: SlotInfill[OpenSlot], token_threshold: float) -> Steps[None]:
    """Fill slots left to right by next-token predictions, with guesses as in Jacobi decoding.

    The logits at the last accepted token give the next token; those at the rejected proposals after it give guesses for
    the rest. Before the first round the proposals are the plan's drafts. This is a decoder of its own, not a faster
    form of :func:`~refusion_lit.refusion.infill.infill_by_masks`.

    Args:
        infill: Changed in place; not packed.
        token_threshold: Proposals above it are accepted.
    """
    draw = Draw(sampling=infill.state.sampling.greedy(), with_probability=False)
    num_free = 0
    while not infill.is_done:
        branches = []
        for slot in infill.slots:
            cached = slot.num_cached
            untested = range(0) if slot.is_complete else range(slot.num_accepted, len(slot.tokens))
            offsets = [offset - cached - 1 for offset in untested]
            scores = [(offset, slot.tokens[cached + 1 + offset]) for offset in offsets]
            branches.append(infill.branch(slot, slot.tokens[cached:], draft_at=offsets, score_at=scores, shift=1))
        readings = yield Forward(phase="infill_autoregressive", branches=tuple(branches), draw=draw)
        for slot, reading in zip(infill.slots, readings, strict=True):
            if slot.is_complete:
                continue
            before = slot.num_accepted
            slot.accept(reading.scores[num_free:], token_threshold, num_free=num_free)
            slot.tokens[slot.num_accepted :] = reading.tokens[slot.num_accepted - before :]
        num_free = 1  # from now on, the first proposal is the model's own choice: progress every round
        infill.close_round()


def open_slots(state: BonusState, chosen: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
    """Open slots: commit their first tokens; all others are drafts.

    Args:
        state: Changed in place.
        chosen: Numbers of the slots, in text order.
        drafts: The first tokens of each slot, one for each mask that the plan had.
    """
    infill = opened(state, chosen, drafts, [1] * len(chosen), DraftedSlot, packed=True)
    for slot, own in zip(infill.slots, drafts, strict=False):
        slot.num_drafts = len(own) - 1
    infill.commit()
    state.remaining = [slot for slot in state.remaining if slot not in chosen]
    _close(state, infill)


def advance(state: BonusState, masks_of: Callable[..., Branch], *, num_drafts: int | None, fused: bool) -> Steps[bool]:
    """Verify the drafts of all open slots in one forward, and draft and plan in it where that may save a forward.

    Args:
        state: Changed in place.
        masks_of: Returns the branch that plans slots, here those after the open ones, written after their places in the
            cache; without tokens if no slot is left.
        num_drafts: Maximum number of drafts per slot; ``None``: the rest of the slot.
        fused: Whether masks may be fed before the drafts that they follow are known to be accepted.

    Returns:
        Whether open slots got tokens; if not, there were none, or the forward only planned.
    """
    infill = state.infill
    if infill is None:
        return False
    last = infill.slots[-1]
    upcoming = state.upcoming(infill.taken, ends=infill.found_eos)
    masks = masks_of(state, upcoming, num_seen=last.fed_end, write_at=last.end)
    is_open = not infill.is_done
    fed = [slot for slot in infill.slots if slot.num_cached < slot.num_fed]
    groups = _groups(state, infill, num_drafts, fused=fused)
    num_masks = sum(len(branch.tokens) for branch in groups.values())
    is_few = num_masks <= FEW_POSITIONS
    branches = [_branch(infill, slot) for slot in fed]
    branches += [branch if is_few else replace(branch, draft_at=()) for branch in groups.values()]
    plans = bool(masks.tokens) and _pays(state, infill, len(masks.tokens), fused=fused)
    draw = state.draw
    # A plan may be sampled, the model's own tokens are not: with both, the plan is read once it is needed.
    is_sampled = draw.sampling.temperature > 0 and is_open
    own = Draw(sampling=draw.sampling.greedy(), with_probability=False) if is_sampled else draw
    is_plan_read = own is draw and (is_few or not is_open)
    if plans:
        plan = replace(masks, write_at=masks.write_at + num_masks, draft_at=masks.draft_at if is_plan_read else ())
        branches.append(plan)
    phase = "+".join(["verify"] * is_open + ["draft"] * bool(groups) + ["plan"] * plans)
    readings = yield state.forward(phase, branches, own)
    planned = readings[-1]
    before = infill.taken, infill.found_eos
    accepted = [(slot, _accept(state, slot, reading)) for slot, reading in zip(fed, readings, strict=False)]
    infill.drop_after_end()
    infill.commit()
    used = {(slot.number, number): slot for slot, number in accepted if slot in infill.slots and not slot.is_complete}
    used = {key: slot for key, slot in used.items() if key in groups}
    if used and not is_few:
        wanted = [branch.draft_at if key in used else () for key, branch in groups.items()]
        readings = yield MoreDrafts(draft_at=(*[()] * len(fed), *wanted, *[()] * plans), draw=own)
    for key, reading in zip(groups, readings[len(fed) :], strict=False):
        if key in used:
            used[key].propose(reading.tokens)
    if plans and _is_cached(infill) and (infill.taken, infill.found_eos) == before:  # no EOS that ends the text earlier
        if not is_plan_read:
            planned = (yield MoreDrafts(draft_at=(*[()] * (len(branches) - 1), masks.draft_at), draw=draw))[-1]
        state.planned = planned
    _close(state, infill)
    return is_open


def _is_cached(infill: SlotInfill[DraftedSlot]) -> bool:
    """Whether all slots are complete and in the cache; a bonus token at the end of a slot is not."""
    return infill.is_done and all(slot.num_cached == slot.num_accepted for slot in infill.slots)


def _branch(infill: SlotInfill[DraftedSlot], slot: DraftedSlot) -> Branch:
    """Return the branch that feeds what is not cached of a slot; an open one's next tokens are read after its drafts.

    Tokens are read after the last accepted one and after each draft, unless it is the slot's last token.
    """
    tokens = slot.tokens[slot.num_cached : slot.num_fed]
    last = min(slot.num_fed, len(slot.tokens) - 1)
    offsets = () if slot.is_complete else range(slot.num_accepted - 1 - slot.num_cached, last - slot.num_cached)
    return infill.branch(slot, tokens, draft_at=offsets, shift=1)


def _groups(
    state: BonusState, infill: SlotInfill[DraftedSlot], num_drafts: int | None, *, fused: bool
) -> Mapping[tuple[int, int], Branch]:
    """Return masks after the acceptances that are worth them: each by its slot's number and its number of drafts.

    The first mask of a group stands where the model's own token will, and drafts nothing.
    """
    groups = {}
    open_ones = [slot for slot in infill.slots if not slot.is_complete]
    write_at = infill.slots[-1].end
    for slot in open_ones:
        cost = state.forward_cost / (state.num_rows * len(open_ones))  # they share it
        last = slot.num_drafts if fused or slot.num_drafts == 0 else -1
        for accepted in range(last + 1):
            place = slot.num_accepted + accepted
            most = len(slot.tokens) - place - 1
            most = most if num_drafts is None else min(most, num_drafts)
            number = _num_masks(state, slot, accepted, most, cost)
            if number == 0:
                continue
            groups[slot.number, accepted] = Branch(
                tokens=[state.mask_token_id] * (1 + number),
                positions=range(slot.start + place, slot.start + place + 1 + number),
                visible=((0, state.num_cached), (slot.write_at, slot.write_at + place)),
                write_at=write_at,
                draft_at=range(1, 1 + number),
            )
            write_at += 1 + number
    return groups


def _num_masks(state: BonusState, slot: DraftedSlot, accepted: int, most: int, forward_cost: float) -> int:
    """Return how many drafts to make by masks for the case that a number of a slot's drafts is accepted.

    With drafts of which E are accepted on average, a forward gives 1 + E tokens. What masks save over guesses, in
    forwards per token, times the chance of the case and the cost of a forward, must be worth their positions. A forward
    costs a fixed amount and about as many positions as this one.
    """
    rate = _counts(state, slot).rate
    is_rejected = accepted < slot.num_drafts
    chance = rate**accepted * (1 - rate if is_rejected else 1)
    num_guesses = slot.num_drafts - accepted - is_rejected
    guesses = sum(state.guesses.rate**k for k in range(1, num_guesses + 1))
    drafts = 0.0
    best = (0.0, 0)
    for number in range(1, most + 1):
        drafts += state.acceptance.rate**number
        cost = forward_cost + 2 + slot.num_drafts + number
        saved = chance * cost * (1 / (1 + guesses) - 1 / (1 + drafts))
        best = max(best, (saved - 1 - number, number))
    return best[1]


def _counts(state: BonusState, slot: DraftedSlot) -> Acceptance:
    """Return the counts of recent drafts that were made as those of a slot were."""
    return state.guesses if slot.is_guessed else state.acceptance


def _accept(state: BonusState, slot: DraftedSlot, reading: Reading) -> int:
    """Accept drafts up to the first that is not the model's own token, and then that token; return how many drafts.

    The model's choices after it are the slot's next drafts until there are better ones.
    """
    if slot.is_complete:  # its last token was not cached yet
        slot.num_cached = slot.num_accepted
        return 0
    drafts = slot.tokens[slot.num_accepted : slot.num_fed]
    pairs = zip(drafts, reading.tokens, strict=False)
    accepted = next((i for i, (draft, own) in enumerate(pairs) if draft != own), len(drafts))
    _counts(state, slot).count(accepted + 1, min(accepted + 1, len(drafts)), accepted)
    own = reading.tokens[accepted : accepted + 1]  # nothing after a slot's last token
    slot.num_cached = slot.num_accepted + accepted
    slot.num_accepted = slot.num_cached + len(own)
    slot.tokens[slot.num_cached : slot.num_accepted] = own
    slot.propose(reading.tokens[accepted + 1 :], guessed=True)
    return accepted


def _pays(state: BonusState, infill: SlotInfill[DraftedSlot], num_masks: int, *, fused: bool) -> bool:
    """Whether to append the masks of a plan: it is valid only if all slots get complete and cached in the forward."""
    open_ones = [slot for slot in infill.slots if not slot.is_complete]
    if not open_ones:
        return True
    if not fused or any(slot.num_fed < len(slot.tokens) for slot in open_ones):
        return False
    chance = prod(_counts(state, slot).rate ** slot.num_drafts for slot in open_ones)
    return chance * state.forward_cost / state.num_rows > (1 - chance) * num_masks


def _close(state: BonusState, infill: SlotInfill[DraftedSlot]) -> None:
    """Close the open slots once all are complete and cached, or nothing is left to see them."""
    state.remaining = state.left(infill.taken, ends=infill.found_eos)
    is_last = infill.is_done and not state.upcoming(infill.taken, ends=infill.found_eos)
    state.infill = infill
    if is_last or _is_cached(infill):
        state.num_cached = infill.slots[-1].fed_end
        state.infill = None
    state.finished = state.infill is None and state.is_filled
