"""D2F, discrete diffusion forcing (arXiv 2508.09192): a pipeline of blocks that are decoded at once.

``D2F`` is the decoder. ``DiffusionForcing`` trains for it: a block sees earlier blocks, which have fewer masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.engine.branches import list_masked
from refusion_lit.engine.decoder import ModelRequirements, RowState, above_or_best
from refusion_lit.engine.requests import Draw, Forward, Steps
from refusion_lit.families.block_diffusion.decoder import BlockDecoder
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import extend_to_multiple
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_number


@dataclass(kw_only=True)
class PipelineState(RowState):
    """State of D2F.

    Attributes:
        blocks: Positions of the opened blocks, from left to right.
    """

    blocks: list[range] = field(default_factory=list)

    def share(self, number: int) -> float:
        """Return the share of known tokens in a block, given tokens included; 1 for the text before the blocks."""
        if number < 0:
            return 1.0
        block = self.blocks[number]
        return 1 - len(list_masked(self, block.start, block.stop)) / len(block)

    @property
    def stop(self) -> int:
        """Position after the last opened block."""
        return self.blocks[-1].stop if self.blocks else self.prompt_length

    @property
    def first_open(self) -> int:
        """Number of the first block with masks; the number of blocks if there is none."""
        return next((i for i in range(len(self.blocks)) if self.share(i) < 1), len(self.blocks))


@dataclass(frozen=True, kw_only=True)
class D2F(BlockDecoder):
    """Decodes several blocks at once; opens a block as soon as enough of the previous block is known.

    A forward feeds all open blocks, and complete blocks that are not cached yet. Attention is block-causal: a block
    sees itself and all earlier blocks, masks included. Every block commits masks whose token is more probable than
    ``threshold``. If there is no such mask, a *fully activated* block commits its most probable mask: a block is fully
    activated once at least the share ``activate_threshold`` of the previous block is known. Before a forward, at most
    one block with masks is opened; completely given blocks need no forward. Once a block and all earlier blocks are
    complete, the next forward stores their exact KV cache entries. The prompt is one block, and blocks start where the
    response starts, as in training.

    Source: discrete diffusion forcing (arXiv 2508.09192, algorithm 1) and the released program, whose thresholds are
    the defaults. Deliberate differences: after any committed EOS token no block is opened (in the program, only after
    an EOS token in the last block); blocks are decoded whole, and tokens beyond ``max_new_tokens`` are not returned.

    Attributes:
        block_size: Tokens per block, at least 1; may differ from training (the paper trains with 16, decodes with 32).
        threshold: Commit every mask whose token is more probable (tau_conf), in [0, 1]; the comparison is strict.
        add_threshold: Open the next block once this share of the last block is known (tau_add), in [0, 1].
        activate_threshold: A block always commits a token once this share of the previous block is known (tau_act), in
            [0, 1].
        num_open_blocks: Maximum number of open blocks, from the first block with masks on; ``None``: no limit.

    >>> from refusion_lit.decoding import default_decoder
    >>> default_decoder(DiffusionForcing(block_size=16).traits) == D2F(block_size=16)
    True
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
        """Run one forward over all open blocks and commit tokens in them."""
        self._open(state)
        first = state.first_open
        masked = {i: list_masked(state, block.start, block.stop) for i, block in enumerate(state.blocks) if i >= first}
        read = [position for positions in masked.values() for position in positions]
        branch = self._branch(state, state.stop, read)
        draw = Draw(sampling=state.sampling, round=state.num_forwards)
        reading = (yield Forward(phase="denoise", branches=(branch,), draw=draw))[0]
        state.num_cached = state.blocks[first].start
        drafts = dict(zip(read, zip(reading.tokens, reading.probabilities, strict=True), strict=True))
        activated = [state.share(i - 1) >= self.activate_threshold for i in masked]  # before anything is committed
        for positions, is_activated in zip(masked.values(), activated, strict=True):
            confidences = [drafts[p][1] for p in positions]
            chosen = [positions[i] for i in above_or_best(confidences, self.threshold, int(is_activated))]
            state.commit([p - state.prompt_length for p in chosen], [drafts[p][0] for p in chosen])

    def _open(self, state: PipelineState) -> None:
        """Open the next block with masks, and completely given blocks before it, if :meth:`_is_due`."""
        while self._is_due(state):
            state.blocks.append(range(state.stop, state.stop + self.block_size))
            if state.share(len(state.blocks) - 1) < 1:
                return

    def _is_due(self, state: PipelineState) -> bool:
        """Whether enough of the last block is known to open another block, and the response continues after it."""
        num_open = len(state.blocks) - state.first_open
        is_full = self.num_open_blocks is not None and num_open >= self.num_open_blocks
        is_last = state.stop >= state.prompt_length + len(state.tokens)
        ends = state.first_eos([state.tokens[place] for place in state.committed]) is not None
        return state.share(len(state.blocks) - 1) >= self.add_threshold and not (is_full or is_last or ends)


@dataclass(frozen=True, kw_only=True)
class DiffusionForcing(Objective):
    """Predicts masks from their block and all earlier blocks, which have fewer masks.

    Source: D2F (arXiv 2508.09192). The response is cut into N blocks, and EOS tokens fill the last block. Mask
    probabilities rise from block to block: p_0 is uniform in [t_min, t_max), and
    p_b = p_(b-1) + u_b (t_max - p_0) / (N - 1) with u_b uniform in [0, 1). Response tokens are masked independently
    with the probability p of their block. The prompt sees itself; a block sees the prompt, itself and all earlier
    blocks, masks included. No clean copy is fed, so a sample costs only its length. The term ``mdm`` is the mean over
    masked tokens: cross-entropy / p.

    Deliberate difference: the targets are the response tokens, so that training may start from any weights. D2F's
    targets are the base model's predictions with bidirectional attention, and it trains adapters.

    Attributes:
        block_size: Tokens per block, at least 1; the decoder may use another size.
        t_min: Smallest mask probability, in (0, 1]; 0.3 in the paper's text, 0.2 in the released program.
        t_max: Largest mask probability, in [t_min, 1].

    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> objective = DiffusionForcing(block_size=2, t_min=1.0, t_max=1.0)
    >>> objective.corrupt(batch, KeyedNoise(batch.sample_keys), special).labels  # an EOS token fills the second block
    tensor([[-100,    6,    7,    8,    1]])
    """

    term = "mdm"
    ranges = {"block_size": 1, "t_min": "(0, 1]"}
    block_size: int = 16
    t_min: float = 0.2
    t_max: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("objective.t_max", self.t_max, f"[{self.t_min}, 1]")

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; the prompt is one block; masks predict themselves."""
        return ModelTraits(
            attention="block_causal", block_size=self.block_size, predictions=("mask",), prompt_is_block=True
        )

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens, more in later blocks; see :meth:`Objective.corrupt`.

        ``mask_ratio`` sets the mask probability for all blocks in a row.
        """
        size = self.block_size
        batch = extend_to_multiple(batch, size, special_tokens)
        num_blocks = batch.response_lengths // size
        positions, in_response, is_real = batch.positions, batch.in_response, batch.is_real
        block = ((positions - batch.prompt_lengths[:, None]) // size).clamp(min=0)
        ratios = self._ratios(num_blocks, -(-len(positions) // size), noise, mask_ratio).gather(1, block)
        is_masked = in_response & (noise.uniform("token_mask", len(positions)) < ratios)

        stops = batch.prompt_lengths[:, None] + torch.where(in_response, (block + 1) * size, 0)
        seen = torch.stack((torch.zeros_like(stops), stops), -1)
        itself = torch.stack((positions, positions + 1), -1)
        return CorruptedBatch(
            input_ids=batch.input_ids.masked_fill(is_masked, required_mask_id(self, special_tokens)),
            position_ids=positions.expand_as(is_masked),
            labels=batch.input_ids.where(is_masked, IGNORE_INDEX),
            weights=(1 / ratios).float().where(is_masked, 0.0),
            terms=torch.zeros_like(batch.input_ids),
            counts=is_masked.sum()[None].float(),
            visible=torch.where(is_real[..., None], seen, itself)[:, :, None],
            is_masked=is_masked,
            is_real=is_real,
        )

    def _ratios(
        self, num_blocks: Int[Tensor, " batch"], max_blocks: int, noise: KeyedNoise, mask_ratio: MaskRatio
    ) -> Float[Tensor, "batch block"]:
        """Draw mask probabilities for ``max_blocks`` blocks per sample; they never fall from left to right."""
        if mask_ratio is not None:
            return repeat(mask_probability(noise, 0.0, mask_ratio), "sample -> sample block", block=max_blocks)
        uniform = noise.uniform("block_ratio", max_blocks)
        first = self.t_min + (self.t_max - self.t_min) * uniform[:, :1]
        steps = torch.cat((torch.zeros_like(first), uniform[:, 1:]), 1)
        rise = (self.t_max - first) / (num_blocks[:, None] - 1).clamp(min=1)
        return (first + rise * steps.cumsum(1)).clamp(max=self.t_max)
