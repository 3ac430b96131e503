"""Block diffusion: decodes blocks left to right with an exact KV cache, and a block's tokens in parallel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from refusion_lit.engine.branches import list_masked, text_branch
from refusion_lit.engine.decoder import (
    Decoder,
    ModelRequirements,
    RowState,
    above_or_best,
    max_length,
    most_certain,
)
from refusion_lit.engine.requests import Branch, Confidence, Draw, Forward, Reading, Statistic, Steps
from refusion_lit.families.llada.decoder import step_quota, warn_of_low_temperature
from refusion_lit.noise import uniform_scalar
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require


@dataclass(kw_only=True)
class SubBlockState(RowState):
    """State of block diffusion.

    Attributes:
        span_step: Number of steps done in the current sub-block.
        cached_block: Start of the block with all noisy tokens in the cache; -1 if no block has all.
    """

    span_step: int = 0
    cached_block: int = -1


@dataclass(frozen=True, kw_only=True)
class BlockDecoder(Decoder):
    """Base of decoders for block-causal models, in which a block sees itself and earlier blocks.

    The KV cache is exact, because complete blocks do not depend on later blocks.

    Attributes:
        block_size: Tokens per block, at least 1; must be the size in training.
    """

    ranges = {"block_size": 1}
    block_size: int = 32

    def requirements(self) -> ModelRequirements:
        """Return block-causal attention with this block size. If the prompt is a single block, any block size fits."""
        size = None if self.requires.prompt_is_block else self.block_size
        return replace(super().requirements(), block_size=size)

    def mismatch_fix(self, traits: ModelTraits) -> str:
        """Return the advice to set ``block_size``, if the block size is all that does not fit."""
        size = traits.block_size
        fits = size is not None and not replace(self.requirements(), block_size=size).mismatches(traits)
        return f"Set block_size to {size}, the model's." if fits else super().mismatch_fix(traits)

    def refusal(self, prompt: Prompt) -> str | None:
        """Refuse given tokens in later blocks than the first token to generate: the model would not see them."""
        if not prompt.num_to_fill:
            return None
        start = 0 if self.requires.prompt_is_block else len(prompt.token_ids)
        first = prompt.given.index(None) - int(self.shifted)
        last = prompt.given_length - 1
        if (start + first) // self.block_size == (start + last) // self.block_size:
            return None
        return f"its model fills a span from blocks of {self.block_size} tokens that end before some of the given text"

    def num_shareable(self, prompt_length: int, num_common: int) -> int:
        """Return how many common tokens to share: whole blocks, without the prompt's last block.

        The prompt's last block is always fed, so that sharing does not change the number of forwards. If the prompt is
        a single block, nothing is shared.
        """
        num_blocks = min(num_common // self.block_size, prompt_length // self.block_size - 1)
        return 0 if self.requires.prompt_is_block else max(num_blocks, 0) * self.block_size

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a canvas for the longest response, extended to the last block's end."""
        # Prompt tokens in the first block that has generated tokens.
        num_before = 0 if self.requires.prompt_is_block else len(prompt.token_ids) % self.block_size
        length = num_before + max_length(prompt, sampling, special_tokens)
        length = -(-length // self.block_size) * self.block_size - num_before
        return self.state(prompt, sampling, special_tokens, length)

    def _branch(self, state: RowState, stop: int, drawn: Sequence[int]) -> Branch:
        """Return the text from the end of the cache to ``stop``; a block sees itself and earlier blocks."""
        start = state.num_cached
        first = state.prompt_length if self.requires.prompt_is_block else 0
        order = [max((position - first) // self.block_size, -1) for position in range(start, stop)]
        return text_branch(state, start, stop, drawn, order=order, shift=int(self.shifted))


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(BlockDecoder):
    """Decodes block by block, and unmasks a block's masks in parallel. A block sees all of itself.

    Blocks are counted from position 0, prompt included, as in training. A prompt that ends inside a block begins the
    first decoded block. Tokens beyond ``max_new_tokens`` in the last block are computed, but not returned. Decoding
    stops once no mask is left before the first EOS token or the end of the response.

    Sources and their options:

    - BD3-LM (arXiv 2503.09573): ``sampling_rule="first_hitting"``;
    - Fast-dLLM v2 (arXiv 2509.26328): ``block_size=32, sub_block_size=8, shifted=True``;
    - SDAR (arXiv 2510.06303): ``block_size=4, confidence="tempered", fused=False`` and, for ``low_confidence_dynamic``,
      ``num_steps=4, threshold=0.85``; for ``low_confidence_static``, ``num_steps=4, threshold=1``; for ``sequential``,
      ``num_steps=4, sampling_rule="sequential"``; for ``entropy_bounded``, ``sampling_rule="entropy_bounded"``.

    Deliberate differences:

    - BD3-LM: no sliding window and no stop at a low entropy; top-p keeps the crossing token; at temperature 0 the most
      confident place is unmasked, so ``first_hitting`` equals ``threshold=1``.
    - Fast-dLLM v2: any number of new tokens, not only whole blocks plus a token.
    - SDAR: the last block is not cached, which saves the last forward, and decoding may stop inside a block.

    Attributes:
        block_size: Tokens per block; must be the size in training (for smaller steps, set ``sub_block_size``).
        sampling_rule: Tokens that a forward commits. ``threshold``: tokens with a probability above ``threshold``, and
            at least the quota's number of most probable tokens. ``sequential``: the leftmost masks, up to the quota.
            ``entropy_bounded``: tokens in rising order of entropy while the sum of their entropies is below
            ``entropy_bound``, at least the most certain token. ``first_hitting``: a token at a uniformly drawn place.
        threshold: For ``threshold``, in [0, 1]; the comparison is strict, so 1 commits the quota alone.
        entropy_bound: For ``entropy_bounded``: upper bound of the summed entropies in nats, at least 0.
        num_steps: Steps per sub-block, for ``threshold`` and ``sequential`` (``denoising_steps`` in SDAR). The quota is
            the sub-block divided equally by the steps; ``None``: 1.
        confidence: Distribution of probabilities and entropies: ``raw`` (softmax of the logits), ``filtered`` (after
            top-k and top-p), or ``tempered`` (after temperature, top-k and top-p, as in SDAR's and Fast-dLLM v2's
            programs). At temperatures below 0.3, tempered probabilities round to 1: masks are unmasked from left to
            right, and any threshold is passed.
        sub_block_size: Tokens per sub-block; sub-blocks of a block are decoded left to right. A divisor of
            ``block_size``; ``None``: a single sub-block.
        shifted: The model predicts a mask at the position before it. A block's first token is then predicted greedily
            by the last token of the clean block before it, in the forward that caches that block.
        sub_block_cache: Approximate cache (``use_block_cache`` in Fast-dLLM v2): compute the whole block while a
            sub-block's first token is a mask, then only the sub-block, with old cache entries for the rest of the
            block. Needs ``sub_block_size`` and ``shifted``.
        fused: Cache clean blocks in the first forward of the next block. Exact, and saves a forward per block. With
            ``shifted``, a block's first token needs the clean block before it, so only the first forward is saved, if
            the prompt ends inside a block.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published/models/fast-dllm-v2-tiny")
    >>> decoder = BlockDiffusion(block_size=32, sub_block_size=8, shifted=True, threshold=0.9)
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=decoder, max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=54;50+77=122;', 20, 12)
    """

    requires = ModelRequirements(attention="block_causal", predictions=("mask",))

    state = SubBlockState
    ranges = {"threshold": "[0, 1]", "entropy_bound": 0.0, "num_steps": 1, "sub_block_size": 1}
    block_size: int = 8
    sampling_rule: Literal["threshold", "sequential", "entropy_bounded", "first_hitting"] = "threshold"
    threshold: float = 0.9
    entropy_bound: float = 0.35
    num_steps: int | None = None
    confidence: Confidence = "raw"
    sub_block_size: int | None = None
    shifted: bool = False
    sub_block_cache: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        has_quota = self.sampling_rule in ("threshold", "sequential")
        expected = f"null with sampling_rule {self.sampling_rule!r}"
        require(self.num_steps is None or has_quota, "num_steps", expected, self.num_steps, "leave one of them out")
        size = self.sub_block_size
        is_divisor = size is None or self.block_size % size == 0
        expected = f"a divisor of block_size {self.block_size}, or null"
        require(is_divisor, "sub_block_size", expected, size, "choose one that fills the block exactly")
        can_cache = not self.sub_block_cache or (size is not None and self.shifted)
        expected = "false without sub_block_size and shifted"
        require(can_cache, "sub_block_cache", expected, self.sub_block_cache, "set both")

    def check(self, sampling: SamplingParams) -> None:
        """Warn of tempered confidences at a low temperature."""
        if self.confidence == "tempered" and self.sampling_rule in ("threshold", "entropy_bounded"):
            warn_of_low_temperature(self, sampling)

    @property
    def _span_size(self) -> int:
        return self.sub_block_size or self.block_size

    @property
    def _statistic(self) -> Statistic | None:
        """Return the statistic that ranks drafts; ``None`` for the raw probability."""
        if self.sampling_rule == "entropy_bounded":
            return "negative_entropy"
        return None if self.confidence == "raw" else "probability"

    def step(self, state: SubBlockState) -> Steps[None]:  # type: ignore[override]
        """Draw tokens for the current sub-block, or a block's first token if the previous block predicts it."""
        first = state.prompt_length + state.is_masked.index(True)
        block_start = first // self.block_size * self.block_size
        if self.shifted and first == block_start:
            yield from self._store(state, block_start, predicts=True)
        else:
            span_end = (first // self._span_size + 1) * self._span_size
            drawn = list_masked(state, first, span_end)
            if self.sampling_rule == "first_hitting" and state.sampling.temperature > 0:
                # The place does not depend on the tokens. It is drawn first, so that only one position's logits are
                # read.
                uniform = uniform_scalar("first_hitting", state.sampling.seed, state.prompt.id, state.num_forwards)
                drawn = [drawn[int(uniform * len(drawn))]]
            elif self.sampling_rule == "sequential":
                drawn = drawn[: self._quota(state)]
            if not self.fused and state.num_cached < block_start:
                yield from self._store(state, block_start, predicts=False)
            yield from self._denoise(state, block_start, drawn)
            state.span_step = state.span_step + 1 if list_masked(state, first, span_end) else 0

    def _quota(self, state: SubBlockState) -> int:
        """Return the minimum number of tokens of this step."""
        quota = 1 if self.num_steps is None else step_quota(self._span_size, self.num_steps, state.span_step)
        return max(quota, 1)

    def _denoise(self, state: SubBlockState, block_start: int, drawn: list[int]) -> Steps[None]:
        """Forward the block, after clean blocks that are not cached yet; commit some of the drawn tokens."""
        branch = self._noisy_branch(state, block_start, drawn)
        draw = Draw(
            sampling=state.sampling,
            round=state.num_forwards,
            statistic=self._statistic,
            confidence=self.confidence,
        )
        [reading] = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        state.num_cached = block_start
        chosen = self._choose(reading, self._quota(state))
        state.commit([drawn[i] - state.prompt_length for i in chosen], [reading.tokens[i] for i in chosen])

    def _choose(self, reading: Reading, quota: int) -> list[int]:
        """Return the indices of the drafts to commit."""
        if self.sampling_rule == "sequential":
            return [*range(len(reading.tokens))]
        if self.sampling_rule == "entropy_bounded":
            entropies = [abs(value) for value in reading.statistic]
            ranked = most_certain([-entropy for entropy in entropies])
            sums = accumulate(entropies[i] for i in ranked)
            return sorted(ranked[: max(sum(total < self.entropy_bound for total in sums), 1)])
        threshold = math.inf if self.sampling_rule == "first_hitting" else self.threshold
        return above_or_best(reading.statistic or reading.probabilities, threshold, quota)

    def _noisy_branch(self, state: SubBlockState, block_start: int, drawn: list[int]) -> Branch:
        """Return the block after clean blocks that are not cached yet, or the sub-block alone."""
        stop = block_start + self.block_size
        span_start = drawn[0] // self._span_size * self._span_size
        is_cached = self.sub_block_cache and state.cached_block == block_start
        # A sub-block's first token is predicted by the position before it, so its logits need the whole block.
        if not is_cached or drawn[0] == span_start:
            state.cached_block = block_start
            return self._branch(state, stop, drawn)
        span_stop = span_start + self._span_size
        branch = text_branch(state, span_start, span_stop, drawn, order=[0] * self._span_size, shift=int(self.shifted))
        return replace(branch, visible=((0, span_start), (span_stop, stop)))

    def _store(self, state: SubBlockState, block_start: int, *, predicts: bool) -> Steps[None]:
        """Cache the clean blocks before ``block_start``; with ``predicts``, the last token predicts the next token."""
        branch = self._branch(state, block_start, [block_start] if predicts else [])
        draw = Draw(sampling=state.sampling.greedy(), with_probability=False)
        readings = yield Forward(phase="store", branches=(branch,), draw=draw)
        state.num_cached = block_start
        if predicts:
            state.commit([block_start - state.prompt_length], readings[0].tokens)
