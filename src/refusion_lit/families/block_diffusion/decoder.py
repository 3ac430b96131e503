"""Block diffusion: decodes blocks left to right over an exact cache, with parallel unmasking inside a block.

The decoders ``BlockDiffusion`` and ``TokenEditing``, whose filled tokens may be replaced until their block is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, above_or_best, max_length
from refusion_lit.engine.drafting import masked_in, text_branch
from refusion_lit.engine.requests import Branch, ConfidenceDtype, Draw, Forward, Steps
from refusion_lit.families.llada.decoder import step_quota
from refusion_lit.noise import uniform_scalar
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require

MAX_POST_FORWARDS = 16
"""Maximum number of forwards of a block without masks (``max_post_steps``): stops edits that undo each other."""


@dataclass(kw_only=True)
class SubBlockState(RowState):
    """State of block diffusion.

    Attributes:
        span_step: Steps done in the current sub-block, of ``num_steps``.
        cached_block: Start of the block whose noisy tokens are cached as a whole; -1 if none is.
    """

    span_step: int = 0
    cached_block: int = -1


@dataclass(frozen=True, kw_only=True)
class BlockDecoder(Decoder):
    """Base of decoders for block-causal models. Their cache of complete blocks is exact: later blocks do not matter.

    Attributes:
        block_size: Tokens per block, at least 1; must be the trained one.
        ignore_right_context: Accept given tokens in blocks after a token to generate. A block-causal model does not see
            them when it fills that token, so the generated text may not fit them.
    """

    ranges = {"block_size": 1}
    block_size: int = 32
    ignore_right_context: bool = False

    def requirements(self) -> ModelRequirements:
        """Return block-causal attention with this block size, or with any one after a prompt of one block."""
        size = None if self.requires.prompt_is_block else self.block_size
        return replace(super().requirements(), block_size=size)

    def refusal(self, prompt: Prompt) -> str | None:
        """Refuse given tokens in blocks after the first token to generate, unless ``ignore_right_context``."""
        if self.ignore_right_context or not prompt.num_to_fill:
            return None
        start = 0 if self.requires.prompt_is_block else len(prompt.token_ids)
        first = prompt.given.index(None) - int(self.shifted)
        last = prompt.given_length - 1
        if (start + first) // self.block_size == (start + last) // self.block_size:
            return None
        return (
            f"its model fills a span from blocks of {self.block_size} tokens that end before some of the given text "
            "(set ignore_right_context: true to fill it without that text)"
        )

    def num_shareable(self, prompt_length: int, num_common: int) -> int:
        """Return whole common blocks but the prompt's last one, so that the number of forwards does not change.

        0 if the prompt is one block.
        """
        num_blocks = min(num_common // self.block_size, prompt_length // self.block_size - 1)
        return 0 if self.requires.prompt_is_block else max(num_blocks, 0) * self.block_size

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a canvas as long as the longest response, extended to the end of its last block."""
        # Tokens of the prompt in the first block with generated ones.
        num_before = 0 if self.requires.prompt_is_block else len(prompt.token_ids) % self.block_size
        length = num_before + max_length(prompt, sampling, special_tokens)
        length = -(-length // self.block_size) * self.block_size - num_before
        return self.state(prompt, sampling, special_tokens, length)

    def _branch(self, state: RowState, stop: int, drawn: Sequence[int]) -> Branch:
        """Return the text from the end of the cache to ``stop``; each block sees itself and all blocks before it."""
        start = state.num_cached
        first = state.prompt_length if self.requires.prompt_is_block else 0
        order = [max((position - first) // self.block_size, -1) for position in range(start, stop)]
        return text_branch(state, start, stop, drawn, order=order, shift=int(self.shifted))


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(BlockDecoder):
    """Decodes block by block; inside a block, masked tokens are drawn in parallel with bidirectional attention.

    Blocks are counted from position 0, prompt included, as in training. If the prompt ends inside a block, its last
    tokens are the start of the first decoded block. The cache of clean blocks is exact, since they do not depend on
    later blocks. Blocks are always decoded whole; tokens beyond ``max_new_tokens`` are not returned. A prompt is
    finished once no mask is left before its first EOS or its end.

    Sources: BD3-LM (arXiv 2503.09573) with ``first_hitting``; Fast-dLLM v2 (arXiv 2509.26328) is
    ``block_size=32, sub_block_size=8, shifted=True``; SDAR's ``low_confidence_dynamic`` (arXiv 2510.06303) is
    ``block_size=4, num_steps=4, threshold=0.85, confidence="filtered", fused=False``, and its
    ``low_confidence_static`` that with ``threshold=1``.

    Deliberate differences. BD3-LM: no sliding window and no stop at a low entropy; top-p keeps the crossing token; and
    temperature 0 is deterministic, so the place, too, is the most confident one (``first_hitting`` then equals
    ``threshold=1``). Fast-dLLM v2: any number of new tokens is given, where the released program makes whole blocks and
    one token more. SDAR: the last block is not cached, which saves its last forward.

    Attributes:
        block_size: Tokens per block, D; must be the trained one (to decode in smaller steps, set ``sub_block_size``).
        sampling_rule: What a forward commits. ``threshold``: tokens with a probability above ``threshold``, and always
            the most probable one. ``first_hitting``: one token at a uniformly drawn place.
        threshold: For ``threshold``, in [0, 1]; the comparison is strict, so 1 commits one token per forward.
        num_steps: Steps per sub-block, for ``threshold``. Each commits at least its equal share of the sub-block, most
            certain tokens first (``denoising_steps`` in SDAR); ``None``: at least one.
        confidence: What the threshold is compared with: the token's probability under the ``unfiltered`` softmax, or
            under the ``filtered`` one, after temperature, top-k and top-p, as in the programs of SDAR and Fast-dLLM v2.
        confidence_dtype: Type in which confidences are computed. ``None``: at least float32. The authors' programs take
            the type of the weights: set ``bfloat16`` to compare with a run of theirs in bfloat16.
        sub_block_size: Tokens per sub-block; sub-blocks are decoded left to right inside a block. Divides
            ``block_size``. ``None``: one sub-block.
        shifted: The mask at position i is predicted at i - 1. A block's first token is then predicted greedily by the
            last token of the clean block before it, in the forward that caches that block.
        sub_block_cache: Approximate (``use_block_cache`` in Fast-dLLM v2): compute the whole block while a sub-block's
            first token is a mask, then the sub-block alone, with cache entries of the rest of the block as they were.
            Needs ``sub_block_size`` and ``shifted``.
        fused: The forward that caches clean blocks is also the first one of the next block. Exact, and saves one
            forward per block. With ``shifted`` a block's first token waits for the clean block before it, so only the
            first forward is saved, if the prompt ends inside a block.
    """

    requires = ModelRequirements(attention="block_causal", predictions=("mask",))

    state = SubBlockState
    ranges = {"threshold": "[0, 1]", "num_steps": 1, "sub_block_size": 1}
    block_size: int = 8
    sampling_rule: Literal["threshold", "first_hitting"] = "threshold"
    threshold: float = 0.9
    num_steps: int | None = None
    confidence: Literal["unfiltered", "filtered"] = "unfiltered"
    confidence_dtype: ConfidenceDtype | None = None
    sub_block_size: int | None = None
    shifted: bool = False
    sub_block_cache: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self.num_steps is None or self.sampling_rule == "threshold"
        require(holds, "num_steps", "null with sampling_rule 'first_hitting'", self.num_steps, "leave one of them out")
        size = self.sub_block_size
        holds = size is None or self.block_size % size == 0
        expected = f"a divisor of block_size {self.block_size}, or null"
        require(holds, "sub_block_size", expected, size, "choose one that fills the block exactly")
        holds = not self.sub_block_cache or (size is not None and self.shifted)
        require(holds, "sub_block_cache", "false without sub_block_size and shifted", self.sub_block_cache, "set both")

    @property
    def _span_size(self) -> int:
        return self.sub_block_size or self.block_size

    def step(self, state: SubBlockState) -> Steps[None]:  # type: ignore[override]
        """Draw tokens of the current sub-block, or a block's first token where the previous block predicts it."""
        first = state.prompt_length + state.is_masked.index(True)
        block_start = first // self.block_size * self.block_size
        if self.shifted and first == block_start:
            yield from self._store(state, block_start, predicts=True)
        else:
            span_end = (first // self._span_size + 1) * self._span_size
            drawn = masked_in(state, first, span_end)
            if self.sampling_rule == "first_hitting" and state.sampling.temperature > 0:
                # The place does not depend on the tokens, so it is drawn first, and only its logits are read.
                uniform = uniform_scalar("first_hitting", state.sampling.seed, state.prompt.id, state.num_forwards)
                drawn = [drawn[int(uniform * len(drawn))]]
            if not self.fused and state.num_cached < block_start:
                yield from self._store(state, block_start, predicts=False)
            yield from self._denoise(state, block_start, drawn)
            state.span_step = state.span_step + 1 if masked_in(state, first, span_end) else 0

    def _denoise(self, state: SubBlockState, block_start: int, drawn: list[int]) -> Steps[None]:
        """Forward the whole block, and clean blocks that are not cached yet; commit some of the drawn tokens."""
        branch = self._noisy_branch(state, block_start, drawn)
        draw = Draw(
            sampling=state.sampling,
            round=state.num_forwards,
            statistic="filtered" if self.confidence == "filtered" else None,
            confidence_dtype=self.confidence_dtype,
        )
        [reading] = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        state.num_cached = block_start
        threshold = math.inf if self.sampling_rule == "first_hitting" else self.threshold
        quota = 1 if self.num_steps is None else step_quota(self._span_size, self.num_steps, state.span_step)
        chosen = above_or_best(reading.statistic or reading.probabilities, threshold, max(1, quota))
        state.commit([drawn[i] - state.prompt_length for i in chosen], [reading.tokens[i] for i in chosen])

    def _noisy_branch(self, state: SubBlockState, block_start: int, drawn: list[int]) -> Branch:
        """Return the whole block after clean ones that are not cached yet, or the sub-block alone."""
        stop = block_start + self.block_size
        span_start = drawn[0] // self._span_size * self._span_size
        is_cached = self.sub_block_cache and state.cached_block == block_start
        # The logits of a sub-block's first token are read before it, so they need the whole block.
        if not is_cached or drawn[0] == span_start:
            state.cached_block = block_start
            return self._branch(state, stop, drawn)
        span_stop = span_start + self._span_size
        branch = text_branch(state, span_start, span_stop, drawn, order=[0] * self._span_size, shift=int(self.shifted))
        return replace(branch, visible=((0, span_start), (span_stop, stop)))

    def _store(self, state: SubBlockState, block_start: int, *, predicts: bool) -> Steps[None]:
        """Cache the clean blocks before ``block_start``; with ``predicts``, the last token predicts the next one."""
        branch = self._branch(state, block_start, [block_start] if predicts else [])
        draw = Draw(sampling=state.sampling.greedy(), with_probability=False)
        readings = yield Forward(phase="store", branches=(branch,), draw=draw)
        state.num_cached = block_start
        if predicts:
            state.commit([block_start - state.prompt_length], readings[0].tokens)


@dataclass(frozen=True, kw_only=True)
class TokenEditing(BlockDecoder):
    """Decodes block by block; each forward fills masks of the block and edits filled tokens the model disagrees with.

    A forward reads every place of the block that is neither prompt nor given; given tokens never change. It fills the
    masks more probable than ``mask_threshold``, and always the most probable one. The same forward replaces visible
    tokens where another token is more probable than ``edit_threshold``. Once a block has no masks, further forwards
    edit it until one replaces nothing, at most 16 of them. Then the whole block is committed and never changes:
    streaming and stop strings see whole blocks. Blocks are counted from position 0, prompt included; attention is
    block-causal, and the cache of complete blocks is exact.

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
