"""State of ReFusion: which slots remain, and what their context holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_lit.decoding.decoders.slot_state import SlotState
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
class ReFusionState(SlotState):
    """State of ReFusion.

    Attributes:
        remaining: Slots of the current serial block that are not accepted yet, in text order.
        context_length: Cache entries of prompt, given tokens and accepted slots; 0 before the first plan.
        keep: How the next forward compacts the cache.
        num_plans: Plans read so far; keys their noise, independent of the forward that made them.
        num_chosen: Slots chosen by the last plan; the next one is expected to choose about as many.
        num_verified: Verifications so far.
        num_passed: Those of them that accepted all drafts, or all up to an EOS.
        planned: A plan made ahead by the last forward, if it turned out to be the next one.
    """

    remaining: list[int] = field(default_factory=list)
    context_length: int = 0
    keep: Compaction | None = None
    num_plans: int = 0
    num_chosen: int = 0
    num_verified: int = 0
    num_passed: int = 0
    planned: Plan | None = None

    @property
    def has_eos(self) -> bool:
        """Whether an EOS was accepted: generation ends with the current serial block."""
        return self.first_eos([self.tokens[place] for place in self.committed]) is not None

    def take_keep(self) -> Compaction | None:
        """Return the pending compaction, once."""
        keep, self.keep = self.keep, None
        return keep

    def left(self, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return what remains of the serial block once slots are taken; nothing after an EOS in the last of them."""
        limit = taken[-1] if ends else len(self.slots)
        return [slot for slot in self.remaining if slot not in taken and slot < limit]

    def upcoming(self, taken: Sequence[int], *, ends: bool) -> list[int]:
        """Return the slots of the next plan, once slots are taken."""
        left = self.left(taken, ends=ends)
        return left if left or ends or self.has_eos else self.upcoming_block()
