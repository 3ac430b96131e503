"""State of ReFusion: which slots remain, and what their context holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from refusion_lit.decoding.base import RowState
from refusion_lit.decoding.requests import Compaction, Reading


@dataclass(slots=True)
class Plan:
    """Masks of slots that were fed, and what was read from them.

    Attributes:
        slots: The slots in text order: all that remain of a serial block.
        offset: Place of the first mask in its branch, the last one of the forward.
        num_branches: Branches of the forward.
        reading: The reading of that branch.
    """

    slots: list[int]
    offset: int
    num_branches: int
    reading: Reading


@dataclass(kw_only=True)
class ReFusionState(RowState):
    """State of ReFusion.

    Attributes:
        slots: The canvas places of each slot, in text order.
        blocks: The slots of each serial block.
        remaining: Slots of the current serial block that are not accepted yet, in text order.
        next_block: Number of the serial block after the current one.
        context_length: Cache entries of prompt, given tokens and accepted slots; 0 before the first plan.
        keep: How the next forward compacts the cache.
        num_plans: Plans read so far; keys their noise, independent of the forward that made them.
        num_chosen: Slots chosen by the last plan; the next one is expected to choose about as many.
        planned: A plan made ahead by the last forward, if it turned out to be the next one.
    """

    slots: list[range]
    blocks: list[list[int]]
    remaining: list[int] = field(default_factory=list)
    next_block: int = 0
    context_length: int = 0
    keep: Compaction | None = None
    num_plans: int = 0
    num_chosen: int = 0
    planned: Plan | None = None

    @property
    def has_eos(self) -> bool:
        """Whether an EOS was accepted: generation ends with the current serial block."""
        return self.first_eos([self.tokens[place] for place in self.committed]) is not None

    def take_keep(self) -> Compaction | None:
        """Return the pending compaction, once."""
        keep, self.keep = self.keep, None
        return keep

    def places(self, slots: Sequence[int]) -> list[int]:
        """Return the canvas places of slots' tokens, slot by slot."""
        return [place for slot in slots for place in self.slots[slot]]

    def positions(self, slots: Sequence[int]) -> list[int]:
        """Return the positions of slots' tokens, slot by slot."""
        return [self.prompt_length + place for place in self.places(slots)]

    def bounds(self, slots: Sequence[int]) -> list[int]:
        """Return where each of the slots begins if their tokens are joined, and where the last one ends."""
        return list(accumulate((len(self.slots[slot]) for slot in slots), initial=0))

    def upcoming_block(self) -> list[int]:
        """Return the slots of the serial block after the current one, if there is one."""
        return list(self.blocks[self.next_block]) if self.next_block < len(self.blocks) else []

    def left(self, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return what remains of the serial block once slots are taken; nothing after an EOS in the last of them."""
        limit = taken[-1] if ends else len(self.slots)
        return [slot for slot in self.remaining if slot not in taken and slot < limit]

    def upcoming(self, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return the slots of the next plan, once slots are taken."""
        left = self.left(taken, ends=ends)
        return left if left or ends or self.has_eos else self.upcoming_block()


def slot_grid(
    given: Sequence[int | None], length: int, slot_size: int, num_serial_blocks: int
) -> tuple[list[range], list[list[int]]]:
    """Cut the unknown tokens of a response into slots, and the slots into serial blocks.

    Slots hold no given tokens. A hole is cut from its left end, so its last slot may be shorter; what follows the last
    given token is cut into whole slots, also beyond ``length``. The blocks of holes, in text order, come before those
    of the rest: the rest then sees them filled.

    Args:
        given: Given tokens of the response, ``None`` for unknown ones; the last one is given.
        length: Maximum length of the response.
        slot_size: Tokens per slot.
        num_serial_blocks: Blocks of the holes and blocks of the rest, at most.

    Returns:
        The places of each slot, in text order, and the slots of each block.
    """
    unknown = [place for place, token in enumerate(given) if token is None]
    starts = [place for place in unknown if place == 0 or given[place - 1] is not None]
    stops = [place + 1 for place in unknown if given[place + 1] is not None]
    slots = [range(first, min(first + slot_size, stop)) for start, stop in zip(starts, stops, strict=True)
             for first in range(start, stop, slot_size)]  # fmt: skip
    blocks, num_inner = _equal_blocks(range(len(slots)), num_serial_blocks), len(slots)
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
