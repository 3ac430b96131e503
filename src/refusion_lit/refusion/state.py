"""State of ReFusion: the remaining slots, the cached context and the current plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_lit.engine.requests import Compaction, Reading
from refusion_lit.refusion.slots import SlotState


@dataclass(slots=True)
class Plan:
    """A plan: the masks of all remaining slots in a forward, and the reading of their drafts.

    Attributes:
        slots: The remaining slots of a serial block, in text order.
        offset: Offset of the first mask in its branch, which is the last branch of the forward.
        num_branches: Number of branches of the forward.
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
        keep: Pending compaction of the cache by the next forward.
        num_plans: Number of plans read so far. Keys their noise, so that the noise does not depend on the forward.
        num_chosen: Number of slots chosen by the last plan, the estimate for the next plan.
        num_verified: Number of verifications so far.
        num_passed: Number of verifications that accepted all drafts, or all up to an EOS.
        planned: The next plan, if the last forward made it ahead and its drafts were all accepted.
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
