"""Completing chosen slots in parallel: how rejected rests of slots are proposed again and verified.

Every chosen slot is one branch of a forward: the branches share the cached context and do not see each other.
In the reference layout each is a row of the call, all of the same length, as in the released program. Packed, they
lie one behind the other in one row, and only what is not cached yet is fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_lit.decoding.base import Steps
from refusion_lit.decoding.requests import Branch, Draw, Forward, MoreDrafts
from refusion_lit.types import SamplingParams


@dataclass(slots=True)
class OpenSlot:
    """A chosen slot that is being completed.

    Attributes:
        start: Position of its first token.
        index: Its place among the chosen slots; says where in the cache its entries lie.
        tokens: Its tokens; those from ``num_accepted`` on are proposals.
        num_accepted: Length of its accepted prefix, at least 1.
        ends: Whether its accepted prefix ends with an EOS.
        num_cached: Tokens of its accepted prefix whose cache entries are final; used where packed.
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


@dataclass(slots=True)
class SlotInfill:
    """Slots being completed behind a context.

    Attributes:
        slots: The slots, in text order; those behind a found EOS are taken out.
        context_length: Cache entries of the shared context.
        slot_size: Tokens a slot.
        mask_token_id: The mask token.
        eos_token_ids: Ids that end a response.
        sampling: For the draws; completion rounds are greedy.
        num_cached: Tokens of every slot's accepted prefix whose cache entries are final; used where not packed.
        found_eos: Whether a slot ended with an EOS.
        packed: Whether the slots lie in one row, or are a row each.
        max_ahead: Packed only: a verification proposes ahead, for every length that it may accept, if that takes at
            most so many positions. The next round then is a single forward.
    """

    slots: list[OpenSlot]
    context_length: int
    slot_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_cached: int = 0
    found_eos: bool = False
    packed: bool = False
    max_ahead: float = 0
    scratch: int = field(init=False)

    def __post_init__(self) -> None:
        """Lay what is proposed ahead behind all slots; those behind an end have nothing to do."""
        self.scratch = self.context_length + (max(slot.index for slot in self.slots) + 1) * self.slot_size
        if self.packed:
            self.drop_behind_end()

    def cached(self, slot: OpenSlot) -> int:
        """Return how many of a slot's tokens need not be fed again."""
        return slot.num_cached if self.packed else self.num_cached

    def cache_index(self, slot: OpenSlot) -> int:
        """Return the cache index of a slot's first token: slots lie one behind the other."""
        return self.context_length + slot.index * self.slot_size

    def branch(
        self,
        slot: OpenSlot,
        tokens: Sequence[int],
        draft_at: Sequence[int] = (),
        score_at: Sequence[tuple[int, int]] = (),
    ) -> Branch:
        """Make the branch that feeds a slot's tokens behind those that are cached."""
        first, cached = self.cache_index(slot), self.cached(slot)
        return Branch(
            tokens=tokens,
            positions=range(slot.start + cached, slot.start + cached + len(tokens)),
            visible=((0, self.context_length), (first, first + cached)),
            write_at=first + cached,
            draft_at=draft_at,
            score_at=score_at,
        )

    def tested(self, slot: OpenSlot) -> range:
        """Return the offsets of the proposals tested at the token before them: all but the first."""
        return range(0) if slot.is_complete else range(slot.num_accepted + 1, self.slot_size)

    def accept(self, slot: OpenSlot, scores: Sequence[float], threshold: float) -> None:
        """Lengthen a slot's accepted prefix: one token regardless, further ones while they are probable enough.

        Args:
            slot: A slot; nothing happens if it is complete.
            scores: Probability of each proposal but the first.
            threshold: Accepted while above it.
        """
        if slot.is_complete:
            return
        slot.num_accepted += 1
        for score in scores:
            if not score > threshold:
                break
            slot.num_accepted += 1

    def close_round(self) -> None:
        """Look for an EOS, let the slots behind it leave, and count what is cached for good."""
        self.drop_behind_end()
        if self.packed:
            return
        # A slot that ends early holds nobody up: what lies behind its EOS is fed, but never kept.
        fewest = min(self.slot_size if slot.ends else slot.num_accepted for slot in self.slots) - self.num_cached
        self.num_cached += fewest if self.is_done else fewest - 1

    def drop_behind_end(self) -> None:
        """Complete the first slot whose accepted prefix holds an EOS; the slots behind it leave."""
        for place, slot in enumerate(self.slots):
            if not slot.ends and (end := self._end(slot)) is not None:
                slot.num_accepted, slot.ends = end, True
                slot.num_cached = min(slot.num_cached, end)
                self.found_eos = True
            if slot.ends:
                del self.slots[place + 1 :]
                break

    def _end(self, slot: OpenSlot) -> int | None:
        for offset in range(slot.num_accepted):
            if slot.tokens[offset] in self.eos_token_ids:
                return offset + 1
        return None

    @property
    def is_done(self) -> bool:
        """Whether all slots are complete."""
        return all(slot.is_complete for slot in self.slots)

    def kept_indices(self) -> list[int]:
        """Return the cache indices of context and accepted tokens, slots in text order."""
        kept = list(range(self.context_length))
        for slot in self.slots:
            first = self.cache_index(slot)
            kept.extend(range(first, first + slot.num_accepted))
        return kept


def infill_by_masks(completion: SlotInfill, token_threshold: float, round_number: int) -> Steps:
    """Complete slots round by round: masks give proposals, then the proposals are verified.

    A round is two forwards, or one if the verification before has proposed ahead: behind the proposals stands a
    group of masks for every length that may be accepted, each seeing just its own prefix of the slot.

    Args:
        completion: Changed in place.
        token_threshold: A proposal is accepted while its probability is above it.
        round_number: Number of the first draw, for its noise key (draws are greedy).
    """
    how = Draw(sampling=completion.sampling.greedy(), round=round_number, with_probability=False)
    proposed = False
    while not completion.is_done:
        if not proposed:
            yield from _propose(completion, how)
        proposed = yield from _verify(completion, token_threshold, how)


def _propose(completion: SlotInfill, how: Draw) -> Steps:
    size, packed = completion.slot_size, completion.packed
    fed = [s for s in completion.slots if not (packed and s.is_complete and s.num_cached == s.num_accepted)]
    proposing = []
    for slot in fed:
        cached = completion.cached(slot)
        num_known = size if slot.ends and not packed else slot.num_accepted
        num_masks = 0 if slot.ends else size - num_known
        tokens = slot.tokens[cached:num_known] + [completion.mask_token_id] * num_masks
        at = range(num_known - cached, num_known - cached + num_masks)
        proposing.append(completion.branch(slot, tokens, draft_at=at))
    readings = yield Forward(phase="complete_propose", branches=tuple(proposing), draw=how, packed=packed)
    for slot, reading in zip(fed, readings, strict=True):
        slot.num_cached = slot.num_accepted
        if not slot.is_complete:
            slot.tokens[slot.num_accepted :] = reading.tokens


def _verify(completion: SlotInfill, token_threshold: float, how: Draw):  # noqa: ANN202 - a generator
    """Verify proposals; return whether the next ones are there already."""
    packed = completion.packed
    fed = [slot for slot in completion.slots if not (packed and slot.is_complete)]
    verifying = []
    for slot in fed:
        cached = completion.cached(slot)
        scores = [(offset - cached - 1, slot.tokens[offset]) for offset in completion.tested(slot)]
        verifying.append(completion.branch(slot, slot.tokens[cached:], score_at=scores))
    ahead = _masks_ahead(completion, fed) if packed else {}
    readings = yield Forward(
        phase="complete_verify+propose" if ahead else "complete_verify",
        branches=(*verifying, *ahead.values()),
        draw=how,
        packed=packed,
    )
    for slot, reading in zip(fed, readings, strict=False):
        completion.accept(slot, reading.scores, token_threshold)
        slot.num_cached = slot.num_accepted
    completion.close_round()
    if not ahead or completion.is_done:
        return False
    wanted = {(slot.index, slot.num_accepted) for slot in completion.slots if not slot.is_complete}
    draft_at = [range(len(branch.tokens)) if key in wanted else () for key, branch in ahead.items()]
    readings = yield MoreDrafts(draft_at=(*[()] * len(verifying), *draft_at), draw=how)
    proposals = dict(zip(ahead, readings[len(verifying) :], strict=True))
    for slot in completion.slots:
        if not slot.is_complete:
            slot.tokens[slot.num_accepted :] = proposals[slot.index, slot.num_accepted].tokens
    return True


def _masks_ahead(completion: SlotInfill, fed: Sequence[OpenSlot]) -> dict[tuple[int, int], Branch]:
    """Return, by slot and accepted length, the masks that propose the rest; none if they take too many positions."""
    size = completion.slot_size
    lengths = [(slot, length) for slot in fed for length in range(slot.num_accepted + 1, size)]
    if sum(size - length for _, length in lengths) > completion.max_ahead:
        return {}
    ahead, write_at = {}, completion.scratch
    for slot, length in lengths:
        first = completion.cache_index(slot)
        ahead[slot.index, length] = Branch(
            tokens=[completion.mask_token_id] * (size - length),
            positions=range(slot.start + length, slot.start + size),
            visible=((0, completion.context_length), (first, first + length)),
            write_at=write_at,
            prefetch_at=(range(size - length),),
        )
        write_at += size - length
    return ahead


def infill_autoregressively(completion: SlotInfill, token_threshold: float, round_number: int) -> Steps:
    """Complete slots with one forward a round, whose own logits give the next round's proposals.

    The logits at the last accepted token give the next token, those at the rejected proposals behind it the
    guesses for the rest (as in Jacobi decoding). A different decoder from :func:`infill_by_masks`, not an exact
    speed-up of it. Before the first round the proposals are the plan's drafts.

    Args:
        completion: Changed in place; not packed.
        token_threshold: A proposal is accepted while its probability is above it.
        round_number: Number of the first draw, for its noise key (draws are greedy).
    """
    how = Draw(sampling=completion.sampling.greedy(), round=round_number, shift=1, with_probability=False)
    first = True
    while not completion.is_done:
        cached = completion.num_cached
        branches = []
        for slot in completion.slots:
            untested = range(0) if slot.is_complete else range(slot.num_accepted, completion.slot_size)
            offsets = [offset - cached - 1 for offset in untested]
            scores = [(offset, slot.tokens[cached + 1 + offset]) for offset in offsets]
            branches.append(completion.branch(slot, slot.tokens[cached:], draft_at=offsets, score_at=scores))
        readings = yield Forward(phase="complete_autoregressive", branches=tuple(branches), draw=how)
        for slot, reading in zip(completion.slots, readings, strict=True):
            if slot.is_complete:
                continue
            before = slot.num_accepted
            while slot.num_accepted < completion.slot_size:
                score = reading.scores[slot.num_accepted - before]
                # After the first round, the first proposal is the model's own choice: progress every round.
                own_choice = not first and slot.num_accepted == before
                if not (own_choice or score > token_threshold):
                    break
                slot.num_accepted += 1
            slot.tokens[slot.num_accepted :] = reading.tokens[slot.num_accepted - before :]
        first = False
        completion.close_round()
