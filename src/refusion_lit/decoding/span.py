"""The unit that logits are read in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from refusion_lit.decoding.requests import Draw, Reading


@dataclass(slots=True)
class Span:
    """Places of one branch that are read alike.

    Attributes:
        reading: Where what is read goes.
        draw: How tokens are drawn.
        index: The places, as indices into the hidden states.
        given: The token at each place whose probability is wanted; ``None`` where tokens are drawn.
        noise_keys: Key of each place's noise, where there is any.
        guide: Distance to each place's logits that guide it.
        start: Place of the branch's first token.
        later: Groups of offsets that may be read later, see :class:`~refusion_lit.decoding.requests.Branch`.
        later_keys: Key of the noise at each of these offsets, where there is any.
        num_likely: How many groups probably will be.
        ahead: Tokens that were drawn ahead, by offset.
    """

    reading: Reading
    draw: Draw
    index: Sequence[int]
    given: Sequence[int] | None = None
    noise_keys: Sequence[int] = ()
    guide: int = 0
    start: int = 0
    later: Sequence[Sequence[int]] = ()
    later_keys: Mapping[int, int] = field(default_factory=dict)
    num_likely: int = 0
    ahead: dict[int, int] = field(default_factory=dict)
