"""Slots of a response around given tokens, their serial blocks, and ReFusion's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from refusion_lit.engine.decoder import RowState, max_length
from refusion_lit.engine.requests import Branch, Compaction, Draw, Forward, Reading
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require


@dataclass(kw_only=True)
class SlotState(RowState):
    """State of decoders that decode slots.

    Attributes:
        slots: The canvas places of each slot, in text order.
        blocks: The slots of each serial block after the current one.
        num_plans: Number of plans read so far. Keys their noise, so that the noise does not depend on the forward.
        keep: Pending compaction of the cache by the next forward.
    """

    slots: list[range]
    blocks: list[list[int]]
    num_plans: int = 0
    keep: Compaction | None = None

    @classmethod
    def cut(
        cls,
        prompt: Prompt,
        sampling: SamplingParams,
        special_tokens: SpecialTokens,
        slot_size: int,
        num_serial_blocks: int,
    ) -> Self:
        """Create a canvas of slots, rounded up to equal serial blocks after the last given token."""
        length = max_length(prompt, sampling, special_tokens)
        given = prompt.given[: prompt.given_length]
        slots, blocks = slot_grid(given, length, slot_size, num_serial_blocks)
        length = max([len(given), *(slot.stop for slot in slots)])
        return cls(prompt, sampling, special_tokens, length, slots=slots, blocks=blocks)

    def places(self, slots: Sequence[int]) -> list[int]:
        """Return the canvas places of slots' tokens, slot by slot."""
        return [place for slot in slots for place in self.slots[slot]]

    def positions(self, slots: Sequence[int], most: int | None = None) -> list[int]:
        """Return the positions of slots' tokens, slot by slot; with ``most``, of that many of each."""
        return [self.prompt_length + place for slot in slots for place in self.slots[slot][:most]]

    def bounds(self, slots: Sequence[int], most: int | None = None) -> list[int]:
        """Return the offsets at which the slots start if their tokens are concatenated, and the end of the last one."""
        return list(accumulate((len(self.slots[slot][:most]) for slot in slots), initial=0))

    @property
    def draw(self) -> Draw:
        """How the next plan is drawn."""
        return Draw(sampling=self.sampling, round=self.num_plans)

    def forward(self, phase: str, branches: Sequence[Branch], draw: Draw) -> Forward:
        """Return a forward of branches in one row, after the pending compaction."""
        keep = self.keep
        self.keep = None
        return Forward(phase=phase, branches=tuple(branches), draw=draw, packed=True, keep=keep)


@dataclass(slots=True)
class Plan:
    """A plan: the masks of all remaining slots in a forward, and the reading of their drafts.

    Attributes:
        offset: Offset of the first mask in its branch, which is the last branch of the forward.
        num_branches: Number of branches of the forward.
        reading: The reading of that branch.
    """

    offset: int
    num_branches: int
    reading: Reading


@dataclass(kw_only=True)
class ReFusionState(SlotState):
    """State of ReFusion.

    Attributes:
        remaining: Slots of the current serial block that are not accepted yet, in text order.
        context_length: Cache entries of prompt, given tokens and accepted slots; 0 before the first plan.
        planned: The next plan, if the last forward made it ahead and its drafts were all accepted.
    """

    remaining: list[int] = field(default_factory=list)
    context_length: int = 0
    planned: Plan | None = None

    @property
    def is_filled(self) -> bool:
        """Whether no slot is left of the last serial block, or of the response up to an EOS."""
        return not self.remaining and (not self.blocks or self.prefix_ends)

    def left(self, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return what remains of the serial block once slots are taken; nothing after an EOS in the last of them."""
        limit = taken[-1] if ends else len(self.slots)
        return [slot for slot in self.remaining if slot not in taken and slot < limit]

    def upcoming(self, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return the slots of the next plan, once slots are taken."""
        left = self.left(taken, ends=ends)
        if left or ends:
            return left
        # Once an EOS is accepted, generation ends with the current serial block.
        has_eos = self.first_eos([self.tokens[place] for place in self.committed]) is not None
        return self.blocks[0] if self.blocks and not has_eos else []


def require_serial_blocks(num_blocks: int, slot_size: int, sampling: SamplingParams) -> None:
    """Refuse more serial blocks than slots."""
    num_slots = -(-sampling.max_new_tokens // slot_size)
    expected = f"at most {num_slots} ({sampling.max_new_tokens} new tokens in slots of {slot_size})"
    fix = "use fewer serial blocks, smaller slots or more new tokens"
    require(num_blocks <= num_slots, "num_serial_blocks", expected, num_blocks, fix)


def slot_grid(
    given: Sequence[int | None], length: int, slot_size: int, num_serial_blocks: int
) -> tuple[list[range], list[list[int]]]:
    """Cut the unknown tokens of a response into slots, and the slots into serial blocks.

    Slots hold no given tokens. A span is cut from its left end, so its last slot may be shorter; what follows the last
    given token is cut into whole slots, also beyond ``length``. The blocks of spans, in text order, come before those
    of the rest: the rest then sees them filled.

    Args:
        given: Given tokens of the response, ``None`` for unknown ones; the last one is given.
        length: Maximum length of the response.
        slot_size: Tokens per slot.
        num_serial_blocks: Blocks of the spans and blocks of the rest, at most.

    Returns:
        The places of each slot, in text order, and the slots of each block.
    """
    unknown = [place for place, token in enumerate(given) if token is None]
    starts = [place for place in unknown if place == 0 or given[place - 1] is not None]
    stops = [place + 1 for place in unknown if given[place + 1] is not None]
    slots = [range(first, min(first + slot_size, stop)) for start, stop in zip(starts, stops, strict=True)
             for first in range(start, stop, slot_size)]  # fmt: skip
    blocks = _equal_blocks(range(len(slots)), num_serial_blocks)
    num_inner = len(slots)
    rest = range(len(given), length, slot_size)
    outer = _equal_blocks(range(num_inner, num_inner + len(rest)), num_serial_blocks)
    if outer:  # whole blocks
        num_missing = len(outer[0]) - len(outer[-1])
        outer[-1] += range(num_inner + len(rest), num_inner + len(rest) + num_missing)
        rest = range(len(given), length + num_missing * slot_size, slot_size)
    slots += [range(first, first + slot_size) for first in rest]
    return slots, blocks + outer


def _equal_blocks(slots: range, num_blocks: int) -> list[list[int]]:
    """Cut slots into at most ``num_blocks`` blocks of one size; the last one may be smaller."""
    size = max(-(-len(slots) // num_blocks), 1)
    return [list(slots[start : start + size]) for start in range(0, len(slots), size)]
