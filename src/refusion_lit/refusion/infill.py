"""Parallel infill: masks propose the rejected tails of chosen slots again, and verifications accept them.

Every chosen slot is one branch of a forward: branches share the cached context and do not see each other. In the
reference layout each branch is a row of the call, all of the same length, as in the released program. Packed branches
lie one after the other in one row, and only tokens that are not cached yet are fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.requests import Branch, Draw, Forward, MoreDrafts, Steps


@dataclass(slots=True)
class OpenSlot:
    """A chosen slot that is being filled.

    Attributes:
        start: Position of its first token.
        index: Its place among the chosen slots, which determines its cache region.
        tokens: Its tokens; those from ``num_accepted`` on are proposals.
        num_accepted: Length of its accepted prefix, at least 1.
        ends: Whether its accepted prefix ends with an EOS.
        num_cached: Number of leading tokens whose cache entries are final; they are not fed again.
    """

    start: int
    index: int
    tokens: list[int]
    num_accepted: int
    ends: bool = False
    num_cached: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to accept."""
        return self.ends or self.num_accepted == len(self.tokens)

    def accept(self, scores: Sequence[float], threshold: float) -> None:
        """Extend the accepted prefix by one token, then while the probability of proposals is above the threshold.

        Args:
            scores: Probability of each proposal but the first.
            threshold: Proposals above it are accepted.
        """
        if not self.is_complete:
            rejected = next((i for i, score in enumerate(scores) if not score > threshold), len(scores))
            self.num_accepted += 1 + rejected


@dataclass(slots=True)
class SlotInfill:
    """Parallel infill of slots after a shared context: state and branches.

    Attributes:
        state: The prompt's state: its special ids and sampling options.
        slots: The slots in text order; those after a found EOS are removed.
        context_length: Cache entries of the shared context.
        packed: Whether the slots share one row, or are a row each.
        max_ahead: Packed only: a verification also proposes the next round for every length that it may accept, if
            that takes at most this many positions. The next round is then a single forward.
        found_eos: Whether a slot ended with an EOS.
        scratch: First cache index after all slots, for proposals made ahead.
    """

    state: RowState
    slots: list[OpenSlot]
    context_length: int
    packed: bool = False
    max_ahead: float = 0
    found_eos: bool = False
    scratch: int = field(init=False)
    _offsets: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Place the scratch entries, and look for an EOS among the tokens accepted so far."""
        self._offsets = list(accumulate((len(slot.tokens) for slot in self.slots), initial=0))
        self.scratch = self.context_length + self._offsets[-1]
        if self.packed:
            self.drop_after_end()

    def cache_index(self, slot: OpenSlot) -> int:
        """Return the cache index of a slot's first token."""
        return self.context_length + self._offsets[slot.index]

    def branch(
        self,
        slot: OpenSlot,
        tokens: Sequence[int],
        draft_at: Sequence[int] = (),
        score_at: Sequence[tuple[int, int]] = (),
        shift: int = 0,
    ) -> Branch:
        """Return the branch that feeds a slot's tokens after those that are cached."""
        first, cached = self.cache_index(slot), slot.num_cached
        return Branch(
            tokens=tokens,
            positions=range(slot.start + cached, slot.start + cached + len(tokens)),
            visible=((0, self.context_length), (first, first + cached)),
            write_at=first + cached,
            shift=shift,
            draft_at=draft_at,
            score_at=score_at,
        )

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
                slot.num_accepted, slot.ends = eos + 1, True
                slot.num_cached = min(slot.num_cached, eos + 1)
                self.found_eos = True
            if slot.ends:
                del self.slots[place + 1 :]
                return

    @property
    def is_done(self) -> bool:
        """Whether all slots are complete."""
        return all(slot.is_complete for slot in self.slots)

    def kept_indices(self) -> list[int]:
        """Return the cache indices of accepted tokens, slots in text order."""
        firsts = [(self.cache_index(slot), slot.num_accepted) for slot in self.slots]
        return [first + i for first, length in firsts for i in range(length)]


def infill_by_masks(infill: SlotInfill, token_threshold: float, round_number: int) -> Steps[None]:
    """Fill slots round by round: masks propose tokens, then the proposals are verified.

    A round is two forwards, or one if the previous verification has proposed ahead. To propose ahead, a verification
    also feeds a group of masks for every length that may be accepted; each group sees only its own prefix of the slot.

    Args:
        infill: Changed in place.
        token_threshold: Proposals above it are accepted.
        round_number: Number of the first draw, for its noise key (draws are greedy).
    """
    draw = Draw(sampling=infill.state.sampling.greedy(), round=round_number, with_probability=False)
    is_proposed = False
    while not infill.is_done:
        if not is_proposed:
            yield from _propose(infill, draw)
        is_proposed = yield from _verify(infill, token_threshold, draw)


def _propose(infill: SlotInfill, draw: Draw) -> Steps[None]:
    """Draft the tokens after each accepted prefix from masks."""
    mask = infill.state.mask_token_id
    fed = [s for s in infill.slots if not (infill.packed and s.is_complete and s.num_cached == s.num_accepted)]
    branches = []
    for slot in fed:
        cached, size = slot.num_cached, len(slot.tokens)
        num_known = size if slot.ends and not infill.packed else slot.num_accepted
        num_masks = 0 if slot.ends else size - num_known
        tokens = slot.tokens[cached:num_known] + [mask] * num_masks
        masks = range(num_known - cached, num_known - cached + num_masks)
        branches.append(infill.branch(slot, tokens, draft_at=masks))
    readings = yield Forward(phase="infill_propose", branches=tuple(branches), draw=draw, packed=infill.packed)
    for slot, reading in zip(fed, readings, strict=True):
        if infill.packed:
            slot.num_cached = slot.num_accepted
        if not slot.is_complete:
            slot.tokens[slot.num_accepted :] = reading.tokens


def _verify(infill: SlotInfill, token_threshold: float, draw: Draw) -> Steps[bool]:
    """Verify proposals; return whether the same forward has proposed the next ones ahead."""
    fed = [slot for slot in infill.slots if not (infill.packed and slot.is_complete)]
    branches = []
    for slot in fed:
        # A proposal is tested at the token before it; the first one needs no test.
        tested = () if slot.is_complete else range(slot.num_accepted + 1, len(slot.tokens))
        scores = [(offset - slot.num_cached - 1, slot.tokens[offset]) for offset in tested]
        branches.append(infill.branch(slot, slot.tokens[slot.num_cached :], score_at=scores))
    ahead = _masks_ahead(infill, fed) if infill.packed else {}
    phase = "infill_verify+propose" if ahead else "infill_verify"
    readings = yield Forward(phase=phase, branches=(*branches, *ahead.values()), draw=draw, packed=infill.packed)
    for slot, reading in zip(fed, readings, strict=False):
        slot.accept(reading.scores, token_threshold)
    infill.close_round()
    if not ahead or infill.is_done:
        return False
    wanted = {(slot.index, slot.num_accepted): slot for slot in infill.slots if not slot.is_complete}
    draft_at = [range(len(branch.tokens)) if key in wanted else () for key, branch in ahead.items()]
    readings = yield MoreDrafts(draft_at=(*[()] * len(branches), *draft_at), draw=draw)
    for key, reading in zip(ahead, readings[len(branches) :], strict=True):
        if key in wanted:
            wanted[key].tokens[key[1] :] = reading.tokens
    return True


def _masks_ahead(infill: SlotInfill, fed: Sequence[OpenSlot]) -> dict[tuple[int, int], Branch]:
    """Return, by slot and accepted length, the masks that propose the rest; none if they take too many positions."""
    mask = infill.state.mask_token_id
    lengths = [(slot, length) for slot in fed for length in range(slot.num_accepted + 1, len(slot.tokens))]
    if sum(len(slot.tokens) - length for slot, length in lengths) > infill.max_ahead:
        return {}
    ahead, write_at = {}, infill.scratch
    for slot, length in lengths:
        first, num_masks = infill.cache_index(slot), len(slot.tokens) - length
        ahead[slot.index, length] = Branch(
            tokens=[mask] * num_masks,
            positions=range(slot.start + length, slot.start + len(slot.tokens)),
            visible=((0, infill.context_length), (first, first + length)),
            write_at=write_at,
            prefetch_at=(range(num_masks),),
        )
        write_at += num_masks
    return ahead
