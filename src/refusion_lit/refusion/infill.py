"""Parallel infill: masks propose the rejected tails of chosen slots again, and verifications accept them.

Every chosen slot is one branch of a forward: branches share the cached context and do not see each other. In the
reference layout each branch is a row of the call, all of the same length, as in the released program. Packed branches
lie one after the other in one row, and only tokens that are not cached yet are fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.refusion.slots import ReFusionState


@dataclass(slots=True)
class OpenSlot:
    """A chosen slot that is being filled.

    Attributes:
        number: Its number among the slots of the response.
        start: Position of its first token.
        write_at: Cache index of its first token; the others follow, then the next slot.
        tokens: Its tokens; those from ``num_accepted`` on are proposals.
        num_accepted: Length of its accepted prefix, at least 1.
        ends: Whether its accepted prefix ends with an EOS.
        num_cached: Number of leading tokens whose cache entries are final; they are not fed again.
    """

    number: int
    start: int
    write_at: int
    tokens: list[int]
    num_accepted: int
    ends: bool = False
    num_cached: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to accept."""
        return self.ends or self.num_accepted == len(self.tokens)

    def accept(self, scores: Sequence[float], threshold: float, *, num_free: int = 1) -> None:
        """Extend the accepted prefix by ``num_free`` tokens, then while proposals are above the threshold.

        Args:
            scores: Probability of each proposal but the first ``num_free``.
            threshold: Proposals above it are accepted.
            num_free: Number of proposals that need no test.
        """
        if not self.is_complete:
            rejected = next((i for i, score in enumerate(scores) if not score > threshold), len(scores))
            self.num_accepted += num_free + rejected


AnySlot = TypeVar("AnySlot", bound=OpenSlot)


@dataclass(slots=True)
class SlotInfill(Generic[AnySlot]):
    """Parallel infill of slots after a shared context: state and branches.

    Attributes:
        state: The prompt's state: its special ids and sampling options.
        slots: The slots in text order; those after an EOS are removed.
        packed: Whether the slots share one row, or are a row each.
    """

    state: ReFusionState
    slots: list[AnySlot]
    packed: bool = False

    def branch(
        self,
        slot: OpenSlot,
        tokens: Sequence[int],
        draft_at: Sequence[int] = (),
        score_at: Sequence[tuple[int, int]] = (),
        shift: int = 0,
    ) -> Branch:
        """Return the branch that feeds a slot's tokens after those that are cached."""
        start = slot.start + slot.num_cached
        write_at = slot.write_at + slot.num_cached
        return Branch(
            tokens=tokens,
            positions=range(start, start + len(tokens)),
            visible=((0, self.state.num_cached), (slot.write_at, write_at)),
            write_at=write_at,
            shift=shift,
            draft_at=draft_at,
            score_at=score_at,
        )

    @property
    def taken(self) -> list[int]:
        """The open slots' numbers among those of the response."""
        return [slot.number for slot in self.slots]

    @property
    def found_eos(self) -> bool:
        """Whether a slot, which is then the last one, ends with an EOS."""
        return self.slots[-1].ends

    def close_round(self) -> None:
        """Look for an EOS, drop the slots after it, and update the number of final cache entries."""
        self.drop_after_end()
        # In the reference layout, rows feed the last common token again for its output. Complete slots do not limit the
        # common prefix. Tokens after an EOS are fed, but their entries are never kept.
        common = min((slot.num_accepted for slot in self.slots if not slot.is_complete), default=None)
        for slot in self.slots:
            length = len(slot.tokens)
            in_rows = length if common is None else min(common, length) - 1
            slot.num_cached = slot.num_accepted if self.packed else in_rows

    def drop_after_end(self) -> None:
        """Complete the first slot with an EOS in its accepted prefix; drop the slots after it."""
        for place, slot in enumerate(self.slots):
            eos = None if slot.ends else self.state.first_eos(slot.tokens[: slot.num_accepted])
            if eos is not None:
                slot.num_accepted = eos + 1
                slot.ends = True
                slot.num_cached = min(slot.num_cached, eos + 1)
            if slot.ends:
                del self.slots[place + 1 :]
                return

    @property
    def is_done(self) -> bool:
        """Whether all slots are complete."""
        return all(slot.is_complete for slot in self.slots)

    def kept_indices(self) -> list[int]:
        """Return the cache indices of accepted tokens, slots in text order."""
        return [slot.write_at + i for slot in self.slots for i in range(slot.num_accepted)]

    def commit(self) -> None:
        """Commit the accepted tokens that are not committed yet."""
        for slot in self.slots:
            first = slot.start - self.state.prompt_length
            new = [place for place in range(first, first + slot.num_accepted) if self.state.is_masked[place]]
            self.state.commit(new, [slot.tokens[place - first] for place in new])


def opened(
    state: ReFusionState, chosen: Sequence[int], drafts: Sequence[Sequence[int]], num_accepted: Sequence[int],
    kind: type[AnySlot], *, packed: bool,
) -> SlotInfill[AnySlot]:  # fmt: skip
    """Return the infill of slots after the context, each with its drafts and how many of them are accepted."""
    slots = []
    write_at = state.num_cached
    for number, own, accepted in zip(chosen, drafts, num_accepted, strict=True):
        places = state.slots[number]
        undefined = [state.special_tokens.pad_token_id] * (len(places) - len(own))
        slots.append(kind(number, state.prompt_length + places.start, write_at, [*own, *undefined], accepted))
        write_at += len(places)
    infill = SlotInfill(state, slots, packed=packed)
    if packed:
        infill.drop_after_end()
    return infill


def infill_by_masks(infill: SlotInfill[OpenSlot], token_threshold: float) -> Steps[None]:
    """Fill slots round by round: masks propose the tokens after each accepted prefix, then proposals are verified.

    Args:
        infill: Changed in place.
        token_threshold: Proposals above it are accepted.
    """
    packed = infill.packed
    mask = infill.state.mask_token_id
    draw = Draw(sampling=infill.state.sampling.greedy(), with_probability=False)
    while not infill.is_done:
        fed = [s for s in infill.slots if not (packed and s.is_complete and s.num_cached == s.num_accepted)]
        branches = []
        for slot in fed:
            size = len(slot.tokens)
            num_known = size if slot.ends and not packed else slot.num_accepted
            num_masks = 0 if slot.ends else size - num_known
            tokens = slot.tokens[slot.num_cached : num_known] + [mask] * num_masks
            branches.append(infill.branch(slot, tokens, draft_at=range(len(tokens) - num_masks, len(tokens))))
        readings = yield Forward(phase="infill_propose", branches=tuple(branches), draw=draw, packed=packed)
        for slot, reading in zip(fed, readings, strict=True):
            if packed:
                slot.num_cached = slot.num_accepted
            if not slot.is_complete:
                slot.tokens[slot.num_accepted :] = reading.tokens
        fed = [slot for slot in infill.slots if not (packed and slot.is_complete)]
        branches = []
        for slot in fed:
            # A proposal is tested at the token before it; the first one needs no test.
            tested = () if slot.is_complete else range(slot.num_accepted + 1, len(slot.tokens))
            scores = [(offset - slot.num_cached - 1, slot.tokens[offset]) for offset in tested]
            branches.append(infill.branch(slot, slot.tokens[slot.num_cached :], score_at=scores))
        readings = yield Forward(phase="infill_verify", branches=tuple(branches), draw=draw, packed=packed)
        for slot, reading in zip(fed, readings, strict=True):
            slot.accept(reading.scores, token_threshold)
        infill.close_round()
