"""RecomputeKV: the paper's ablation of ReFusion's key/value reuse."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.engine.requests import Branch, Steps
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.infill import SlotInfill
from refusion_lit.refusion.slots import ReFusionState


@dataclass(frozen=True, kw_only=True)
class RecomputeKV(ReFusion):
    """ReFusion with an extra forward after each parallel infill that recomputes keys and values.

    In the recomputed keys and values, slots filled in parallel see each other: the paper's ablation of key/value reuse.
    """

    def _store(self, state: ReFusionState, infill: SlotInfill, upcoming: list[int]) -> Steps[None]:
        branch = Branch(
            tokens=[token for slot in infill.slots for token in slot.tokens[: slot.num_accepted]],
            positions=[slot.start + i for slot in infill.slots for i in range(slot.num_accepted)],
            visible=((0, state.context_length),),
            write_at=state.context_length,
        )
        yield from self._forward_and_plan(state, "recompute", branch, upcoming, len(branch.tokens))
        state.context_length += len(branch.tokens)
