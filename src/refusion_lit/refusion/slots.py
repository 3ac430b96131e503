"""Slots around given tokens, serial blocks, and the state for decoders that decode slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, takewhile
from typing import Self

from refusion_lit.engine.decoder import RowState, max_length
from refusion_lit.engine.requests import Branch, Draw, Forward, Reading
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require


@dataclass(slots=True)
class OpenSlot:
    """A chosen slot that is being filled.

    Attributes:
        number: The slot's number in the response.
        places: The slot's places on the canvas, up to an accepted EOS.
        write_at: Cache index of its first token; the other tokens follow, then the next slot.
        tokens: Its tokens; tokens from ``num_accepted`` on are proposals.
        num_accepted: Length of its accepted prefix, at least 1.
        num_cached: Number of tokens, from the start, with final cache entries. They are not fed again.
        ends: Whether its accepted prefix ends with an EOS.
    """

    number: int
    places: range
    write_at: int
    tokens: list[int]
    num_accepted: int = 1
    num_cached: int = 0
    ends: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to accept."""
        return self.num_accepted == len(self.places)


@dataclass(kw_only=True)
class SlotState(RowState):
    """State for decoders that decode slots.

    Attributes:
        slots: The slots' places on the canvas, in text order.
        blocks: For every serial block, the slots that are neither open nor filled, in text order; no block is empty.
        num_plans: Number of plans read so far. It keys their noise, so that the noise does not depend on the forward.
        branches: The last forward's branches; a plan comes last.
        open: The open slots, in text order. They share the context, and their cache entries follow it.
        planned: The next plan's reading, if the last forward made it ahead and all drafts were accepted.
    """

    slots: list[range]
    blocks: list[list[int]]
    num_plans: int = 0
    branches: Sequence[Branch] = ()
    open: list[OpenSlot] = field(default_factory=list)
    planned: Reading | None = None

    @classmethod
    def cut(
        cls,
        prompt: Prompt,
        sampling: SamplingParams,
        special_tokens: SpecialTokens,
        slot_size: int,
        num_serial_blocks: int,
    ) -> Self:
        """Create a canvas whose unknown tokens are cut into slots, and the slots into serial blocks.

        Slots contain no given tokens. A span is cut from its left end, so its last slot may be shorter. The rest, after
        the last given token, is cut into whole slots and equal blocks, even if they reach beyond the maximum length.
        The spans' blocks come first, in text order, so that the rest sees filled spans. ``num_serial_blocks`` is the
        maximum number of blocks, once for the spans and once for the rest.
        """
        given = prompt.given[: prompt.given_length]
        spans = [[*run] for known, run in groupby(range(len(given)), lambda i: given[i] is not None) if not known]
        slots = [range(first, min(first + slot_size, span[-1] + 1)) for span in spans for first in span[::slot_size]]
        num_inner = len(slots)
        num_outer = -(-max(max_length(prompt, sampling, special_tokens) - len(given), 0) // slot_size)
        num_outer += -num_outer % _block_size(num_outer, num_serial_blocks)  # whole blocks
        length = len(given) + num_outer * slot_size
        slots += [range(first, first + slot_size) for first in range(len(given), length, slot_size)]
        blocks = []
        for numbers in (range(num_inner), range(num_inner, len(slots))):
            size = _block_size(len(numbers), num_serial_blocks)
            blocks += [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]
        return cls(prompt, sampling, special_tokens, length, slots=slots, blocks=blocks)

    def positions(self, slots: Sequence[int], most: int | None = None) -> list[int]:
        """Return slots' positions, slot by slot; with ``most``, only every slot's first positions."""
        return [self.prompt_length + place for slot in slots for place in self.slots[slot][:most]]

    def bounds(self, slots: Sequence[int], most: int | None = None) -> list[int]:
        """Return the offsets at which slots start if their tokens are concatenated, and the total length."""
        return list(accumulate((len(self.slots[slot][:most]) for slot in slots), initial=0))

    @property
    def draw(self) -> Draw:
        """Options for drawing the next plan."""
        return Draw(sampling=self.sampling, round=self.num_plans)

    def forward(self, phase: str, branches: Sequence[Branch], draw: Draw) -> Forward:
        """Return a forward whose branches share a row."""
        self.branches = branches
        return Forward(phase=phase, branches=tuple(branches), draw=draw, packed=True)

    def accept(self, slot: OpenSlot, scores: Sequence[float], threshold: float) -> None:
        """Accept an open slot's proposals up to the first failure, or up to an EOS.

        Args:
            slot: Changed in place.
            scores: The last proposals' probabilities; earlier proposals need no test.
            threshold: Proposals above it pass.
        """
        passes = [score > threshold for score in scores]
        slot.num_accepted = len(slot.tokens) - len(scores) + [*passes, False].index(False)
        self.end_at_eos(slot)

    def end_at_eos(self, slot: OpenSlot) -> None:
        """Complete an open slot at the first EOS in its accepted prefix."""
        eos = self.first_eos(slot.tokens[: slot.num_accepted])
        if eos is not None:
            slot.ends = True
            slot.num_accepted = eos + 1
            slot.places = slot.places[: eos + 1]
            del slot.tokens[eos + 1 :]

    def drop_after_end(self) -> None:
        """Drop the open slots after the first slot with an EOS."""
        last = next((i for i, slot in enumerate(self.open) if slot.ends), len(self.open))
        del self.open[last + 1 :]

    def remaining_blocks(self, taken: Sequence[OpenSlot], *, ends: bool) -> list[list[int]]:
        """Return the serial blocks without taken slots; with ``ends``, also without slots after the last taken slot."""
        numbers = {slot.number for slot in taken}
        limit = taken[-1].number if ends else len(self.slots)
        blocks = [[slot for slot in block if slot < limit and slot not in numbers] for block in self.blocks]
        return [block for block in blocks if block]

    def close(self) -> None:
        """Commit the open slots before the first incomplete slot; the other slots are planned again."""
        self.drop_after_end()
        taken = [*takewhile(lambda slot: slot.is_complete, self.open)]
        for slot in taken:
            self.commit(slot.places, slot.tokens)
            self.num_cached += len(slot.tokens)
        self.blocks = self.remaining_blocks(taken, ends=taken[-1].ends)
        self.open = []
        self.finished = not self.blocks


def require_serial_blocks(num_blocks: int, slot_size: int, sampling: SamplingParams) -> None:
    """Refuse more serial blocks than slots."""
    num_slots = -(-sampling.max_new_tokens // slot_size)
    expected = f"at most {num_slots} ({sampling.max_new_tokens} new tokens in slots of {slot_size})"
    fix = "use fewer serial blocks, smaller slots or more new tokens"
    require(num_blocks <= num_slots, "num_serial_blocks", expected, num_blocks, fix)


def _block_size(num_slots: int, num_blocks: int) -> int:
    """Return the number of slots per block, for at most ``num_blocks`` blocks; the last block may have fewer."""
    return max(-(-num_slots // num_blocks), 1)
