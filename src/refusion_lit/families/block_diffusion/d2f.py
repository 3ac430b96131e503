"""D2F, discrete diffusion forcing: decodes a pipeline of blocks; later ones start before earlier ones are complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from refusion_lit.engine.decoder import ModelRequirements, RowState, above_or_best
from refusion_lit.engine.drafting import masked_in
from refusion_lit.engine.requests import Draw, Forward, Steps
from refusion_lit.families.block_diffusion.decoder import BlockDecoder


@dataclass(kw_only=True)
class PipelineState(RowState):
    """State of D2F.

    Attributes:
        blocks: Positions of each block that was opened, from left to right.
    """

    blocks: list[range] = field(default_factory=list)

    def share(self, number: int) -> float:
        """Return the share of a block's tokens that are known, given ones too; 1 for the text before the blocks."""
        if number < 0:
            return 1.0
        block = self.blocks[number]
        return 1 - len(masked_in(self, block.start, block.stop)) / len(block)

    @property
    def stop(self) -> int:
        """Position after the last open block."""
        return self.blocks[-1].stop if self.blocks else self.prompt_length

    @property
    def first_open(self) -> int:
        """Number of the first block with masks; the number of blocks if there is none."""
        return next((i for i in range(len(self.blocks)) if self.share(i) < 1), len(self.blocks))


@dataclass(frozen=True, kw_only=True)
class D2F(BlockDecoder):
    """Decodes several blocks at once: a block is opened as soon as enough of the one before it is known.

    A forward feeds the complete blocks that are not cached yet and all open ones. Attention is block-causal: a block
    sees itself and all blocks before it, masks included. In each block it commits all masks more probable than
    ``threshold``. If a block has no such mask, it commits its most probable one, provided that it is *fully activated*:
    a share of at least ``activate_threshold`` of the block before it is known. At most one block with masks is opened
    before each forward; blocks whose tokens are all given take no forward of their own. Once a block and all blocks
    before it are complete, the next forward stores its KV cache entries, which are exact. The prompt is one block, and
    blocks are counted from the response on, as D2F is trained.

    Source: discrete diffusion forcing (arXiv 2508.09192, algorithm 1) and its released program, whose thresholds are
    the defaults. Deliberate differences: no block is opened after any committed EOS token, not only after one in
    the last block; blocks are decoded whole, and tokens beyond ``max_new_tokens`` are not returned.

    Attributes:
        block_size: Tokens per block, at least 1; need not be the trained one (the paper trains with 16 and decodes with
            32).
        threshold: Commit every mask whose token is more probable (tau_conf), in [0, 1]; the comparison is strict.
        add_threshold: Open the next block once this share of the last one is known (tau_add), in [0, 1].
        activate_threshold: A block always commits a token once this share of the block before it is known (tau_act), in
            [0, 1].
        num_open_blocks: Maximum number of blocks from the first one with masks to the last one; ``None``: no bound.
    """

    requires = ModelRequirements(attention="block_causal", predictions=("mask",), prompt_is_block=True)

    state = PipelineState
    ranges = {
        "threshold": "[0, 1]",
        "add_threshold": "[0, 1]",
        "activate_threshold": "[0, 1]",
        "num_open_blocks": 1,
    }
    threshold: float = 0.9
    add_threshold: float = 0.1
    activate_threshold: float = 0.95
    num_open_blocks: int | None = None

    def step(self, state: PipelineState) -> Steps[None]:  # type: ignore[override]
        """Run one forward over all open blocks and commit tokens in each of them."""
        self._open(state)
        first = state.first_open
        masked = {i: masked_in(state, block.start, block.stop) for i, block in enumerate(state.blocks) if i >= first}
        read = [position for positions in masked.values() for position in positions]
        branch = self._branch(state, state.stop, read)
        draw = Draw(sampling=state.sampling, round=state.num_forwards)
        reading = (yield Forward(phase="denoise", branches=(branch,), draw=draw))[0]
        state.num_cached = state.blocks[first].start
        found = dict(zip(read, zip(reading.tokens, reading.probabilities, strict=True), strict=True))
        activated = [state.share(i - 1) >= self.activate_threshold for i in masked]  # before anything is committed
        for positions, is_activated in zip(masked.values(), activated, strict=True):
            confidences = [found[p][1] for p in positions]
            chosen = [positions[i] for i in above_or_best(confidences, self.threshold, int(is_activated))]
            state.commit([p - state.prompt_length for p in chosen], [found[p][0] for p in chosen])

    def _open(self, state: PipelineState) -> None:
        """Open the next block with masks and the fully given blocks before it, if :meth:`_is_due`."""
        while self._is_due(state):
            state.blocks.append(range(state.stop, state.stop + self.block_size))
            if state.share(len(state.blocks) - 1) < 1:
                return

    def _is_due(self, state: PipelineState) -> bool:
        """Whether enough of the last block is known to open the next one, and the response continues after it."""
        num_open = len(state.blocks) - state.first_open
        is_full = self.num_open_blocks is not None and num_open >= self.num_open_blocks
        is_last = state.stop >= state.prompt_length + len(state.tokens)
        ends = state.first_eos([state.tokens[place] for place in state.committed]) is not None
        return state.share(len(state.blocks) - 1) >= self.add_threshold and not (is_full or is_last or ends)
