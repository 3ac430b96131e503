"""What ReFusion knows of one prompt's decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refusion_lit.decoding.base import RowState
from refusion_lit.decoding.requests import Reading


@dataclass(slots=True)
class Plan:
    """Masks that were fed for slots, which are to be read.

    Attributes:
        slots: The slots, in text order: all that remain of a serial block.
        offset: Place of the first mask in its branch, the forward's last one.
        num_branches: Branches of the forward.
        reading: What was read at the masks.
    """

    slots: list[int]
    offset: int
    num_branches: int
    reading: Reading


@dataclass(kw_only=True)
class ReFusionState(RowState):
    """State of ReFusion.

    Attributes:
        num_slots: Slots of the canvas.
        remaining: Masked slots of the current serial block, in text order.
        next_block: Index of the serial block after the current one.
        context_length: Cache entries of prompt and accepted slots; 0 before the first plan.
        keep: Cache indices to compact at the next forward.
        num_plans: Plans read so far; keys their noise, so that it does not depend on which forward made them.
        num_chosen: Slots that the plan before chose; the next one is expected to choose about as many.
        planned: A plan that a forward made ahead and that turned out to be the next one.
    """

    num_slots: int
    remaining: list[int] = field(default_factory=list)
    next_block: int = 0
    context_length: int = 0
    keep: list[int] | None = None
    num_plans: int = 0
    num_chosen: int = 0
    planned: Plan | None = None

    @property
    def has_end(self) -> bool:
        """Whether an EOS was accepted: generation ends with the current serial block."""
        ends = self.special_tokens.eos_token_ids
        return any(token in ends and not masked for token, masked in zip(self.tokens, self.is_masked, strict=True))

    def take_keep(self) -> list[int] | None:
        """Return the pending compaction, once."""
        keep, self.keep = self.keep, None
        return keep

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the first EOS among tokens."""
        return next((i for i, token in enumerate(tokens) if token in self.special_tokens.eos_token_ids), None)
