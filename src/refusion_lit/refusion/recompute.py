"""RecomputeKV: the ablation of ReFusion's reuse of KV cache entries."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.engine.requests import Steps
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.slots import SlotState
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

    def _fill(self, state: SlotState) -> Steps[None]:
        yield from super()._fill(state)
        yield from self._verify(state, "recompute")  # of complete slots: there is nothing to test
