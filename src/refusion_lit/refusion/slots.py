"""Slots of a response: their places around given tokens, and their serial blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from refusion_lit.engine.decoder import RowState, max_length
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens

State = TypeVar("State", bound="SlotState")


@dataclass(kw_only=True)
class SlotState(RowState):
    """State of decoders that decode slots.

    Attributes:
        slots: The canvas places of each slot, in text order.
        blocks: The slots of each serial block.
        next_block: Number of the serial block after the current one.
    """

    slots: list[range]
    blocks: list[list[int]]
    next_block: int = 0

    @classmethod
    def cut(
        cls: type[State],
        prompt: Prompt,
        sampling: SamplingParams,
        special_tokens: SpecialTokens,
        slot_size: int,
        num_serial_blocks: int,
        **fields: Any,  # noqa: ANN401 - fields of the subclass
    ) -> State:
        """Create a canvas of slots, rounded up to equal serial blocks after the last given token."""
        length, given = max_length(prompt, sampling, special_tokens), prompt.given[: prompt.given_length]
        slots, blocks = slot_grid(given, length, slot_size, num_serial_blocks)
        length = max([len(given), *(slot.stop for slot in slots)])
        return cls.blank(prompt, sampling, special_tokens, length, slots=slots, blocks=blocks, **fields)

    def places(self, slots: Sequence[int]) -> list[int]:
        """Return the canvas places of slots' tokens, slot by slot."""
        return [place for slot in slots for place in self.slots[slot]]

    def positions(self, slots: Sequence[int]) -> list[int]:
        """Return the positions of slots' tokens, slot by slot."""
        return [self.prompt_length + place for place in self.places(slots)]

    def bounds(self, slots: Sequence[int]) -> list[int]:
        """Return the offsets at which the slots start if their tokens are concatenated, and the end of the last one."""
        return list(accumulate((len(self.slots[slot]) for slot in slots), initial=0))

    def upcoming_block(self) -> list[int]:
        """Return the slots of the serial block after the current one, if there is one."""
        return list(self.blocks[self.next_block]) if self.next_block < len(self.blocks) else []


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
