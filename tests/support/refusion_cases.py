"""Random ``ReFusion`` decoders and their prompts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from refusion_lit.decoding import RecomputeKV, ReFusion
from refusion_lit.types import Prompt

THRESHOLDS = st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.9, 1.0])


def make_prompt(token_ids: Sequence[int], name: str = "0") -> Prompt:
    return Prompt(token_ids=tuple(token_ids), id=name)


@st.composite
def decoders(draw: st.DrawFn, num_new_tokens: int) -> ReFusion:
    """Draw a decoder whose number of serial blocks fits the number of new tokens."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    selection = draw(st.sampled_from(["threshold", "threshold", "top_k", "sequential"]))
    cls = draw(st.sampled_from([ReFusion, RecomputeKV]))
    infill = draw(st.sampled_from(["mask", "mask", "autoregressive", *["bonus"] * (cls is ReFusion)]))
    has_bonus = infill == "bonus"
    return cls(
        slot_size=size,
        num_serial_blocks=draw(st.integers(1, -(-num_new_tokens // size))),
        slot_threshold=draw(THRESHOLDS),
        token_threshold=draw(st.sampled_from([0.5, 0.9]) if has_bonus else THRESHOLDS),
        slot_confidence=draw(st.sampled_from(["first", "first", "mean", "min", "product"])),
        selection=selection,
        k=None if selection == "threshold" else draw(st.integers(1, 4)),
        infill=infill,
        num_drafts=draw(st.none() | st.integers(1, 4)) if has_bonus else None,
        fused=False,
        infill_layout="reference",
    )
