"""Token editing: block diffusion whose filled tokens may be replaced until their block is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from refusion_lit.engine.decoder import ModelRequirements, RowState, above_or_best
from refusion_lit.engine.drafting import masked_in
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.families.block_diffusion.decoder import BlockDecoder

MAX_POST_FORWARDS = 16
"""Maximum number of forwards of a block without masks (``max_post_steps``): stops edits that undo each other."""


@dataclass(frozen=True, kw_only=True)
class TokenEditing(BlockDecoder):
    """Decodes block by block; each forward fills masks of the block and edits filled tokens the model disagrees with.

    A forward reads every place of the block that is neither prompt nor given; given tokens never change. It fills the
    masks more probable than ``mask_threshold``, and always the most probable one. The same forward replaces visible
    tokens where another token is more probable than ``edit_threshold``. Once a block has no masks, further forwards
    edit it until one replaces nothing, at most 16 of them. Then the whole block is committed and
    never changes: streaming and stop strings see whole blocks. Blocks are counted from position 0, prompt
    included; attention is block-causal, and the cache of complete blocks is exact.

    Source: LLaDA2.1 (arXiv 2602.08676) and the generation routine of its model card, whose thresholds are the defaults.
    Deliberate differences: the forward that caches a block is the first one of the next block, which saves one forward
    a block; the mask token is never drawn; committed blocks are not edited again (the report's multi-block editing is
    not implemented).

    Attributes:
        mask_threshold: Fill every mask whose token is more probable (mask-to-token threshold), in [0, 1].
        edit_threshold: Replace a token by another one that is more probable than this (token-to-token threshold), in
            [0, 1]; the comparison is strict, so 1 replaces nothing.
    """

    requires = ModelRequirements(attention="block_causal", predictions=("mask", "visible"))

    ranges = {"mask_threshold": "[0, 1]", "edit_threshold": "[0, 1]"}
    mask_threshold: float = 0.95
    edit_threshold: float = 0.9

    def step(self, state: RowState) -> Steps[None]:
        """Fill and edit a whole block, then commit it."""
        first = state.prompt_length + state.is_masked.index(True)
        start = first // self.block_size * self.block_size
        positions = masked_in(state, first, start + self.block_size)
        tokens: list[int | None] = [None] * len(positions)
        num_post = 0
        while num_post < MAX_POST_FORWARDS:
            is_post = None not in tokens
            draw = Draw(sampling=state.sampling, round=state.num_forwards)
            branch = self._noisy_branch(state, positions, tokens)
            reading = (yield Forward(phase="edit" if is_post else "denoise", branches=(branch,), draw=draw))[0]
            state.num_cached = start
            masked = [i for i, token in enumerate(tokens) if token is None]
            best = above_or_best([reading.probabilities[i] for i in masked], self.mask_threshold)
            edited = [
                i for i, token in enumerate(tokens)
                if token not in (None, reading.tokens[i]) and reading.probabilities[i] > self.edit_threshold
            ]  # fmt: skip
            for i in (*edited, *(masked[j] for j in best)):
                tokens[i] = reading.tokens[i]
            num_post += is_post
            if is_post and not edited:
                break
        final = [token for token in tokens if token is not None]
        state.commit([position - state.prompt_length for position in positions], final)

    def _noisy_branch(self, state: RowState, masked: Sequence[int], tokens: Sequence[int | None]) -> Branch:
        """Return the text from the end of the cache to the block's end, with the tokens that are filled so far."""
        branch = self._branch(state, (masked[0] // self.block_size + 1) * self.block_size, masked)
        text = list(branch.tokens)
        for position, token in zip(masked, tokens, strict=True):
            if token is not None:
                text[position - state.num_cached] = token
        return replace(branch, tokens=text)
