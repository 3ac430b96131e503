"""RecomputeKV: the ablation of ReFusion's reuse of KV cache entries."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.engine.requests import Branch, Steps
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.infill import OpenSlot, SlotInfill
from refusion_lit.refusion.slots import ReFusionState
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class RecomputeKV(ReFusion):
    """ReFusion with an extra forward after each parallel infill that recomputes KV cache entries.

    In the recomputed entries, slots filled in parallel see each other: the paper's ablation of KV cache reuse.
    """

    def __post_init__(self) -> None:
        """Refuse ``infill: bonus``, after which all slots' entries are kept as they are."""
        super().__post_init__()
        fix = "use ReFusion for bonus tokens"
        require(self.infill != "bonus", "infill", "mask or autoregressive", self.infill, fix)

    def _store(self, state: ReFusionState, infill: SlotInfill[OpenSlot]) -> Steps[None]:
        upcoming = state.upcoming(infill.taken, ends=infill.found_eos)
        branch = Branch(
            tokens=[token for slot in infill.slots for token in slot.tokens[: slot.num_accepted]],
            positions=[slot.start + i for slot in infill.slots for i in range(slot.num_accepted)],
            visible=((0, state.num_cached),),
            write_at=state.num_cached,
        )
        yield from self._forward_and_plan(state, "recompute", branch, upcoming, len(branch.tokens))
        state.num_cached += len(branch.tokens)
