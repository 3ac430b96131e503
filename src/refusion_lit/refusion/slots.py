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
        branches: Branches of the last forward; a plan is the last one.
    """

    slots: list[range]
    blocks: list[list[int]]
    num_plans: int = 0
    keep: Compaction | None = None
    branches: Sequence[Branch] = ()

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

        Slots hold no given tokens. A span is cut from its left end, so its last slot may be shorter; what follows the
        last given token is cut into whole slots, rounded up to equal blocks, also beyond the maximum length. The blocks
        of spans, in text order, come before those of the rest: the rest then sees them filled. ``num_serial_blocks`` is
        the maximum number of blocks of the spans, and of those of the rest.
        """
        given = prompt.given[: prompt.given_length]  # the last one is known
        unknown = [place for place, token in enumerate(given) if token is None]
        starts = [place for place in unknown if place == 0 or given[place - 1] is not None]
        stops = [place + 1 for place in unknown if given[place + 1] is not None]
        slots = [range(first, min(first + slot_size, stop)) for start, stop in zip(starts, stops, strict=True)
                 for first in range(start, stop, slot_size)]  # fmt: skip
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
        self.branches = branches
        return Forward(phase=phase, branches=tuple(branches), draw=draw, packed=True, keep=keep)


@dataclass(kw_only=True)
class ReFusionState(SlotState):
    """State of ReFusion.

    Attributes:
        remaining: Slots of the current serial block that are not accepted yet, in text order.
        planned: The reading of the next plan, if the last forward made it ahead and its drafts were all accepted.
    """

    remaining: list[int] = field(default_factory=list)
    planned: Reading | None = None

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


def _block_size(num_slots: int, num_blocks: int) -> int:
    """Return the slots of each of at most ``num_blocks`` blocks; the last one may have fewer."""
    return max(-(-num_slots // num_blocks), 1)
