"""State shared by block decoders that cache clean blocks, and the check of given tokens that their model can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.requests import Branch
from refusion_lit.types import Prompt


@dataclass(kw_only=True)
class BlockState(RowState):
    """State of decoders that cache clean blocks.

    Attributes:
        context_length: Number of cache entries: all clean blocks from position 0 on.
    """

    context_length: int = 0

    def text(self, start: int, stop: int) -> list[int]:
        """Return the input at positions ``start`` to ``stop``: committed tokens, and masks elsewhere."""
        mask = self.mask_token_id
        places = range(max(start - self.prompt_length, 0), stop - self.prompt_length)
        canvas = [mask if self.is_masked[place] else self.tokens[place] for place in places]
        return [*self.prompt.token_ids[start:stop], *canvas]

    def branch(
        self, start: int, stop: int, order: Sequence[int], predicted: Sequence[int], *, shift: int = 0
    ) -> Branch:
        """Return the text at positions ``start`` to ``stop`` after everything cached before it.

        Args:
            start: First position.
            stop: Position after the last one.
            order: Order of each token; a token sees tokens of the same or a lower order.
            predicted: Positions whose tokens are drawn.
            shift: Predicted position minus the position whose logits are read.
        """
        return Branch(
            tokens=self.text(start, stop),
            positions=range(start, stop),
            order=order,
            visible=((0, start),),
            write_at=start,
            shift=shift,
            draft_at=[position - shift - start for position in predicted],
        )

    def masked(self, start: int, stop: int) -> list[int]:
        """Return the masked positions from ``start`` to ``stop``."""
        return [p for p in range(max(start, self.prompt_length), stop) if self.is_masked[p - self.prompt_length]]


def whole_blocks(length: int, block_size: int) -> int:
    """Return a length rounded up to whole blocks."""
    return -(-length // block_size) * block_size


def shareable_blocks(prompt_length: int, num_common: int, block_size: int) -> int:
    """Return the length of the whole blocks that prompts have in common, without the prompt's last block.

    The last block is computed in any case, so that the number of forwards is that of the prompt alone.
    """
    return max(min(num_common // block_size, prompt_length // block_size - 1), 0) * block_size


def right_context_refusal(
    prompt: Prompt, block_size: int, *, from_response: bool = False, shifted: bool = False
) -> str | None:
    """Return why a block-causal model does not see all given tokens when it fills holes; ``None`` if it does.

    Args:
        prompt: The prompt.
        block_size: Tokens per block.
        from_response: Blocks are counted from the response's start; otherwise from position 0.
        shifted: A block's first token is predicted by the block before it.
    """
    if not prompt.num_holes:
        return None
    start = 0 if from_response else len(prompt.token_ids)
    hole, last = prompt.given.index(None), prompt.given_length - 1
    if (start + hole - shifted) // block_size == (start + last) // block_size:
        return None
    return (
        f"its model fills a hole from blocks of {block_size} tokens that end before some of the given text "
        "(set ignore_right_context: true to fill it without that text)"
    )
