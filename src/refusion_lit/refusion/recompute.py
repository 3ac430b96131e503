"""RecomputeKV: ReFusion that recomputes KV cache entries, the paper's ablation."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.engine.requests import Steps
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.refusion.slots import SlotState
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class RecomputeKV(ReFusion):
    """ReFusion with an extra forward after every parallel infill that recomputes KV cache entries.

    In the recomputed entries, slots filled in parallel see the slots before them: the paper's ablation.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> [row] = model.generate(["12+34,56+78>"], decoder=RecomputeKV(slot_size=4), max_new_tokens=24)
    >>> row.text
    '12+34=46;56+78=134;'
    """

    def __post_init__(self) -> None:
        """Refuse ``infill: bonus``, which keeps all slots' entries as they are."""
        super().__post_init__()
        fix = "use ReFusion for bonus tokens"
        require(self.infill != "bonus", "infill", "mask or autoregressive", self.infill, fix)

    def _fill(self, state: SlotState) -> Steps[None]:
        yield from super()._fill(state)
        yield from self._verify(state, "recompute")  # all slots are complete: there is nothing to test
