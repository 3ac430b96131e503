"""What is known about a prompt that is decoded in blocks over a cache of clean ones."""

from __future__ import annotations

from dataclasses import dataclass

from refusion_lit.decoding.base import RowState


@dataclass(kw_only=True)
class BlockState(RowState):
    """State of decoders that cache clean blocks.

    Attributes:
        context_length: Cache entries: all clean blocks from position 0 on.
    """

    context_length: int = 0

    def text(self, start: int, stop: int) -> list[int]:
        """Return the input at positions ``start`` to ``stop``: committed tokens, and masks elsewhere."""
        mask = self.mask_token_id
        places = range(max(start - self.prompt_length, 0), stop - self.prompt_length)
        canvas = [mask if self.is_masked[place] else self.tokens[place] for place in places]
        return [*self.prompt.token_ids[start:stop], *canvas]

    def masked(self, start: int, stop: int) -> list[int]:
        """Return the masked positions from ``start`` to ``stop``."""
        return [p for p in range(max(start, self.prompt_length), stop) if self.is_masked[p - self.prompt_length]]
