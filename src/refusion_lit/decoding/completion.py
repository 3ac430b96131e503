"""Completing chosen slots in parallel: how rejected rests of slots are proposed again and verified.

The slots share the cached context and do not see each other. Each is a row of a forward of its own (as in the released
program), or all lie packed in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from refusion_lit.decoding.base import Steps
from refusion_lit.decoding.requests import Branch, Draw, Forward
from refusion_lit.types import SamplingParams

Layout = Literal["rows", "packed", "ahead", "auto"]
"""How completions are fed; see :class:`~refusion_lit.decoding.refusion.ReFusion`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a forward is fed of one slot.

    Attributes:
        slot: The slot.
        first: Offset in the slot of the first token.
        tokens: Tokens or masks.
        draft_at: Offsets into ``tokens`` that are drawn.
        score_at: Offsets into ``tokens`` and token ids whose probability is wanted.
        scratch: Cache index where entries lie that are never kept; ``None`` for the slot's own place.
    """

    slot: OpenSlot
    first: int
    tokens: Sequence[int]
    draft_at: Sequence[int] = ()
    score_at: Sequence[tuple[int, int]] = ()
    scratch: int | None = None


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
        layout: How the slots are fed. Never changes a token.
        forward_cost: Positions that cost as much as the fixed part of a forward, for ``auto``.
        num_cached: Tokens of every slot's accepted prefix whose cache entries are final.
        found_eos: Whether a slot ended with an EOS.
    """

    slots: list[OpenSlot]
    context_length: int
    slot_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams
    layout: Layout = "rows"
    forward_cost: int = 32
    num_cached: int = 0
    found_eos: bool = field(default=False)

    def cache_index(self, slot: OpenSlot) -> int:
        """Return the cache index of a slot's first token: slots lie one behind the other."""
        return self.context_length + slot.index * self.slot_size

    def forward(self, phase: str, feeds: Sequence[Feed], how: Draw):  # noqa: ANN201 - a generator like a step
        """Make one forward of all feeds and return a reading for each."""
        branches = tuple(self.branch(feed) for feed in feeds)
        return (yield Forward(phase=phase, branches=branches, draw=how, packed=self.layout != "rows"))

    def branch(self, feed: Feed) -> Branch:
        """Return the branch of a feed: it sees the context and, of its slot, the tokens before its own first one."""
        entry = self.cache_index(feed.slot)
        start = feed.slot.start + feed.first
        return Branch(
            tokens=feed.tokens,
            positions=range(start, start + len(feed.tokens)),
            visible=((0, self.context_length), (entry, entry + feed.first)),
            write_at=entry + feed.first if feed.scratch is None else feed.scratch,
            draft_at=feed.draft_at,
            score_at=feed.score_at,
        )

    def known(self, slot: OpenSlot) -> Feed:
        """Return the feed of a slot's accepted tokens that are not cached, and of masks behind them."""
        cached, size = self.num_cached, self.slot_size
        num_known = size if slot.ends else slot.num_accepted
        masks = [self.mask_token_id] * (size - num_known)
        at = range(num_known - cached, size - cached)
        return Feed(slot=slot, first=cached, tokens=[*slot.tokens[cached:num_known], *masks], draft_at=at)

    def proposed(self, slot: OpenSlot) -> Feed:
        """Return the feed that verifies a slot's proposals."""
        cached = self.num_cached
        scores = [(offset - cached - 1, slot.tokens[offset]) for offset in self.tested(slot)]
        return Feed(slot=slot, first=cached, tokens=slot.tokens[cached:], score_at=scores)

    def ahead(self) -> list[Feed]:
        """Return masks behind every length that a slot's accepted prefix may get, each seeing just that prefix.

        They go into the very forward that verifies the proposals, and see what it writes.
        """
        scratch = self.context_length + self.slot_size * (1 + max(slot.index for slot in self.slots))
        found = []
        for slot in self.slots:
            for length in self.tested(slot)[1:]:
                masks = [self.mask_token_id] * (self.slot_size - length)
                found.append(Feed(slot=slot, first=length, tokens=masks, draft_at=range(len(masks)), scratch=scratch))
                scratch += len(masks)
        return found

    def looks_ahead(self, feeds: Sequence[Feed]) -> bool:
        """Whether a verification shows the next round's masks too.

        ``auto`` compares what they cost with what a forward of its own would: its fixed part, and the slots once more.
        """
        if self.layout != "auto":
            return self.layout == "ahead"
        still_open = [slot for slot in self.slots if not slot.is_complete]
        num_masks = sum((n := self.slot_size - slot.num_accepted) * (n - 1) // 2 for slot in still_open)
        return num_masks <= self.forward_cost + sum(len(feed.tokens) for feed in feeds)

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
    """Complete slots: masks give proposals, then the proposals are verified.

    Two forwards a round, or one where the verification shows the next round's masks too: whichever length is
    accepted, the proposals behind it are there.

    Args:
        completion: Changed in place.
        token_threshold: A proposal is accepted while its probability is above it.
        round_number: Number of the first draw, for its noise key (draws are greedy).
    """
    how = Draw(sampling=completion.sampling.greedy(), round=round_number)
    is_proposed = False
    while not completion.is_done:
        if not is_proposed:
            feeds = [completion.known(slot) for slot in completion.slots]
            readings = yield from completion.forward("complete_propose", feeds, how)
            for slot, reading in zip(completion.slots, readings, strict=True):
                if not slot.is_complete:
                    slot.tokens[slot.num_accepted :] = reading.tokens
        feeds = [completion.proposed(slot) for slot in completion.slots]
        is_proposed = completion.looks_ahead(feeds)
        ahead = completion.ahead() if is_proposed else []
        phase = "complete_verify+propose" if ahead else "complete_verify"
        readings = yield from completion.forward(phase, [*feeds, *ahead], how)
        for feed, reading in zip(feeds, readings, strict=False):
            completion.accept(feed.slot, reading.scores, token_threshold)
        for feed, reading in zip(ahead, readings[len(feeds) :], strict=True):
            if feed.first == feed.slot.num_accepted:
                feed.slot.tokens[feed.first :] = reading.tokens
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
        feeds = [completion.proposed(slot) for slot in completion.slots]
        feeds = [replace(feed, draft_at=[at for at, _ in feed.score_at]) for feed in feeds]
        readings = yield from completion.forward("complete_autoregressive", feeds, how)
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
