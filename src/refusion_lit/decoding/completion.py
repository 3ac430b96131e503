"""Completing chosen slots in parallel: how rejected rests of slots are proposed again and verified.

Every chosen slot is one branch of a forward: the branches share the cached context and do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_lit.decoding.base import Steps
from refusion_lit.decoding.requests import Branch, Draw, Forward
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
    """

    start: int
    index: int
    tokens: list[int]
    num_accepted: int
    ends: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to accept."""
        return self.ends or self.num_accepted == len(self.tokens)


@dataclass(slots=True)
class Completion:
    """Slots being completed behind a context.

    Attributes:
        slots: The slots, in text order; those behind a found EOS are taken out.
        context_length: Cache entries of the shared context.
        slot_size: Tokens a slot.
        mask_token_id: The mask token.
        eos_token_ids: Ids that end a response.
        sampling: For the draws; completion rounds are greedy.
        num_cached: Tokens of every slot's accepted prefix whose cache entries are final.
        found_eos: Whether a slot ended with an EOS.
    """

    slots: list[OpenSlot]
    context_length: int
    slot_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_cached: int = 0
    found_eos: bool = field(default=False)

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
        """Make the branch that feeds a slot's tokens from ``num_cached`` on."""
        first = self.cache_index(slot)
        return Branch(
            tokens=tokens,
            positions=range(slot.start + self.num_cached, slot.start + self.slot_size),
            visible=((0, self.context_length), (first, first + self.num_cached)),
            write_at=first + self.num_cached,
            draft_at=draft_at,
            score_at=score_at,
        )

    def tested(self, slot: OpenSlot) -> range:
        """Return the offsets of a slot's proposals; they are tested at the token before them."""
        return range(0) if slot.is_complete else range(slot.num_accepted, self.slot_size)

    def accept(self, slot: OpenSlot, scores: Sequence[float], threshold: float) -> None:
        """Lengthen a slot's accepted prefix: one token regardless, further ones while they are probable enough.

        Args:
            slot: A slot; nothing happens if it is complete.
            scores: Probability of each proposal, from the first on.
            threshold: Accepted while above it.
        """
        if slot.is_complete:
            return
        slot.num_accepted += 1
        for score in scores[1:]:
            if not score > threshold:
                break
            slot.num_accepted += 1

    def close_round(self) -> None:
        """Look for an EOS, let the slots behind it leave, and count what all slots have cached."""
        for place, slot in enumerate(self.slots):
            end = None if slot.ends else self._end(slot)
            if slot.ends:
                break
            if end is not None:
                slot.num_accepted, slot.ends = end, True
                self.found_eos = True
                del self.slots[place + 1 :]
                break
        # A slot that ends early holds nobody up: what lies behind its EOS is fed, but never kept.
        fewest = min(self.slot_size if slot.ends else slot.num_accepted for slot in self.slots) - self.num_cached
        self.num_cached += fewest if self.is_done else fewest - 1

    def _end(self, slot: OpenSlot) -> int | None:
        for offset in range(self.num_cached, slot.num_accepted):
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


def complete_by_masks(completion: Completion, token_threshold: float, round_number: int) -> Steps:
    """Complete slots with two forwards a round: masks give proposals, then the proposals are verified.

    Args:
        completion: Changed in place.
        token_threshold: A proposal is accepted while its probability is above it.
        round_number: Number of the first draw, for its noise key (draws are greedy).
    """
    how = Draw(sampling=completion.sampling.greedy(), round=round_number)
    size = completion.slot_size
    while not completion.is_done:
        cached = completion.num_cached
        proposing = []
        for slot in completion.slots:
            num_known = size if slot.ends else slot.num_accepted
            known = slot.tokens[cached:num_known]
            masks = [completion.mask_token_id] * (size - num_known)
            at = range(num_known - cached, size - cached)
            proposing.append(completion.branch(slot, known + masks, draft_at=at))
        readings = yield Forward(phase="complete_propose", branches=tuple(proposing), draw=how)
        for slot, reading in zip(completion.slots, readings, strict=True):
            if not slot.is_complete:
                slot.tokens[slot.num_accepted :] = reading.tokens
        yield from _verify(completion, token_threshold, how)


def _verify(completion: Completion, token_threshold: float, how: Draw) -> Steps:
    cached = completion.num_cached
    verifying = []
    for slot in completion.slots:
        scores = [(offset - cached - 1, slot.tokens[offset]) for offset in completion.tested(slot)]
        verifying.append(completion.branch(slot, slot.tokens[cached:], score_at=scores))
    readings = yield Forward(phase="complete_verify", branches=tuple(verifying), draw=how)
    for slot, reading in zip(completion.slots, readings, strict=True):
        completion.accept(slot, reading.scores, token_threshold)
    completion.close_round()


def complete_autoregressively(completion: Completion, token_threshold: float, round_number: int) -> Steps:
    """Complete slots with one forward a round, whose own logits give the next round's proposals.

    The logits at the last accepted token give the next token, those at the rejected proposals behind it the
    guesses for the rest (as in Jacobi decoding). A different decoder from :func:`complete_by_masks`, not an exact
    speed-up of it. Before the first round the proposals are the plan's drafts.

    Args:
        completion: Changed in place.
        token_threshold: A proposal is accepted while its probability is above it.
        round_number: Number of the first draw, for its noise key (draws are greedy).
    """
    how = Draw(sampling=completion.sampling.greedy(), round=round_number)
    first = True
    while not completion.is_done:
        cached = completion.num_cached
        branches = []
        for slot in completion.slots:
            offsets = [offset - cached - 1 for offset in completion.tested(slot)]
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
