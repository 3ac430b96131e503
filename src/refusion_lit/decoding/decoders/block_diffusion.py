"""Block diffusion: blocks strictly left to right over an exact cache, masks in parallel inside a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from refusion_lit.decoding.base import (
    Decoder,
    ModelRequirements,
    RowState,
    Steps,
    require,
    require_positive,
    require_probability,
)
from refusion_lit.decoding.requests import Branch, Draw, Forward
from refusion_lit.noise import uniform_scalar
from refusion_lit.types import Prediction, Prompt, SamplingParams, SpecialTokens


@dataclass(kw_only=True)
class BlockState(RowState):
    """State of block diffusion.

    Attributes:
        context_length: Cache entries, which hold the whole clean blocks from position 0 on.
        span_step: Steps that the ``ancestral`` schedule has done in the current sub-block.
    """

    context_length: int = 0
    span_step: int = 0

    def text(self, start: int, stop: int) -> list[int]:
        """Return what the model is shown at positions ``start`` to ``stop``: tokens, and masks where not final."""
        mask = self.special_tokens.mask_token_id
        assert mask is not None
        places = range(max(start - self.prompt_length, 0), stop - self.prompt_length)
        canvas = [mask if self.is_masked[place] else self.tokens[place] for place in places]
        return [*self.prompt.token_ids[start:stop], *canvas]

    def masked(self, start: int, stop: int) -> list[int]:
        """Return the masked positions from ``start`` to ``stop``."""
        return [p for p in range(max(start, self.prompt_length), stop) if self.is_masked[p - self.prompt_length]]


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Decoder):
    """Block by block; inside a block masked tokens are drawn in parallel, bidirectionally.

    Blocks are counted from position 0, prompt included, as in training; the prompt's remainder begins the first
    block that is decoded. Clean blocks are cached exactly, as nothing in them depends on later ones. Blocks are
    always decoded whole; what lies beyond ``max_new_tokens`` is not returned. A prompt is done as soon as no mask
    is left before its first EOS or its end.

    Sources: BD3-LM (spec 03, arXiv 2503.09573) with ``first_hitting`` or ``ancestral``; Fast-dLLM v2 (spec 05,
    arXiv 2509.26328) is ``block_size=32, sub_block_size=8, shifted=True``.

    Deliberate differences. BD3-LM: no sliding window, no entropy filter, top-p keeps the crossing token, the
    ancestral schedule belongs to each (sub-)block and ends without masks, and temperature 0 leaves nothing to
    chance: the place, too, is then the most certain one (``first_hitting`` equals ``threshold=1``; ``ancestral``
    takes the expected number, rounded up). Fast-dLLM v2: no approximate cache of sub-blocks, and the certainty is
    the probability under the unfiltered softmax.

    Attributes:
        block_size: Tokens a block, D; must be the trained one (choose ``sub_block_size`` instead).
        sampling_rule: What a forward commits. ``threshold``: tokens of a probability above ``threshold``, and
            always the most probable one. ``first_hitting``: one token at a place chosen uniformly.
            ``ancestral``: with ``num_steps`` steps a sub-block, each masked place at step i (from 0) with probability
            1 / (num_steps - i), the reverse process of a linear mask probability; steps that choose no place need
            no forward.
        threshold: For ``threshold``, in [0, 1]; the comparison is strict, so 1 commits one token a forward.
        num_steps: For ``ancestral`` alone.
        sub_block_size: Sub-blocks of so many tokens are decoded left to right inside a block; divides
            ``block_size``. ``None`` for one sub-block.
        shifted: The mask at position i is predicted at i - 1. A block's first token is then predicted by the last
            token of the clean block before, in the forward that caches that block, and always greedily.
        fused: Let the forward that caches clean blocks be the next block's first one too. Exact, and one
            forward less a block; not possible where ``shifted`` needs the clean block's prediction first.
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(attention="block_causal", predictions=("mask",))

    block_size: int = 8
    sampling_rule: Literal["threshold", "first_hitting", "ancestral"] = "threshold"
    threshold: float = 0.9
    num_steps: int | None = None
    sub_block_size: int | None = None
    shifted: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        rules = ("threshold", "first_hitting", "ancestral")
        require_positive("block_size", self.block_size)
        holds, expected = self.sampling_rule in rules, f"one of {', '.join(rules)}"
        require(holds, "sampling_rule", expected, self.sampling_rule, "choose one of them")
        require_probability("threshold", self.threshold)
        needs_steps = self.sampling_rule == "ancestral"
        expected = f"an integer of at least 1 with sampling_rule {self.sampling_rule!r}" if needs_steps else "null"
        holds = self.num_steps is not None and self.num_steps >= 1 if needs_steps else self.num_steps is None
        require(holds, "num_steps", expected, self.num_steps, "set num_steps exactly with sampling_rule 'ancestral'")
        size = self.sub_block_size
        holds = size is None or (size >= 1 and self.block_size % size == 0)
        expected = f"a divisor of block_size {self.block_size}, or null"
        require(holds, "sub_block_size", expected, size, "choose one that fills the block exactly")

    def requirements(self) -> ModelRequirements:
        """Return block-causal attention with this block size, and shifted predictions if ``shifted``."""
        predictions: tuple[Prediction, ...] = ("mask_shifted",) if self.shifted else ("mask",)
        return ModelRequirements(attention="block_causal", predictions=predictions, block_size=self.block_size)

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> BlockState:
        """Make a canvas of ``max_new_tokens`` that is filled up to the end of its last block."""
        num_known, size = len(prompt.token_ids), self.block_size
        end = -(-(num_known + sampling.max_new_tokens) // size) * size
        length = end - num_known
        assert special_tokens.mask_token_id is not None
        num_spans = -(-end // self._span_size) - num_known // self._span_size
        return BlockState(
            prompt=prompt,
            sampling=sampling,
            special_tokens=special_tokens,
            tokens=[special_tokens.mask_token_id] * length,
            is_masked=[True] * length,
            schedule_length=num_spans * (self.num_steps or 0),
        )

    @property
    def _span_size(self) -> int:
        return self.sub_block_size or self.block_size

    def step(self, state: BlockState) -> Steps:  # type: ignore[override]
        """Draw tokens of the current sub-block, or a block's first token where the block before gives it."""
        first = state.prompt_length + state.is_masked.index(True)
        block_start = first // self.block_size * self.block_size
        if self.shifted and first == block_start:
            yield from self._store(state, block_start, predicts=True)
        else:
            span_end = (first // self._span_size + 1) * self._span_size
            drawn = self._positions_to_draw(state, state.masked(first, span_end))
            if drawn:
                if not self.fused and state.context_length < block_start:
                    yield from self._store(state, block_start, predicts=False)
                yield from self._denoise(state, block_start, drawn)
            if self.sampling_rule == "ancestral":
                state.schedule_step += 1
                state.span_step = state.span_step + 1 if state.masked(first, span_end) else 0
        state.finished = state.prefix_ends

    def _positions_to_draw(self, state: BlockState, masked: list[int]) -> list[int]:
        """Return the positions whose logits are read: all masked ones, or those that chance has chosen already.

        Which places become final is independent of the tokens in both rules of BD3-LM, so it can be decided first.
        """
        seed, prompt_id = state.sampling.seed, state.prompt.id
        if state.sampling.temperature == 0 or self.sampling_rule == "threshold":
            return masked
        if self.sampling_rule == "first_hitting":
            uniform = uniform_scalar("first_hitting", seed, prompt_id, state.num_forwards)
            return [masked[int(uniform * len(masked))]]
        probability = 1 / self._steps_left(state)
        step = state.schedule_step
        return [p for p in masked if uniform_scalar("ancestral", seed, prompt_id, step, p) < probability]

    def _steps_left(self, state: BlockState) -> int:
        assert self.num_steps is not None
        return self.num_steps - state.span_step

    def _num_to_commit(self, state: BlockState, probabilities: Sequence[float]) -> int:
        """Return how many drawn tokens, the most probable first, become final; at least 1."""
        if self.sampling_rule == "threshold":
            return max(1, sum(probability > self.threshold for probability in probabilities))
        if self.sampling_rule == "first_hitting":
            return 1
        if state.sampling.temperature == 0:
            return -(-len(probabilities) // self._steps_left(state))
        return len(probabilities)

    def _denoise(self, state: BlockState, block_start: int, drawn: list[int]) -> Steps:
        """Forward the whole block, and clean blocks that are not cached yet, and commit some of the tokens drawn."""
        start, shift = state.context_length, int(self.shifted)
        branch = self._branch(
            state, block_start + self.block_size, draft_at=[position - shift - start for position in drawn]
        )
        draw = Draw(sampling=state.sampling, round=state.num_forwards, shift=shift)
        readings = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        state.context_length = block_start
        reading = readings[0]
        ranked = sorted(range(len(drawn)), key=lambda i: (-reading.probabilities[i], i))
        chosen = sorted(ranked[: self._num_to_commit(state, reading.probabilities)])
        state.commit([drawn[i] - state.prompt_length for i in chosen], [reading.tokens[i] for i in chosen])

    def _store(self, state: BlockState, block_start: int, *, predicts: bool) -> Steps:
        """Cache the clean blocks before ``block_start``; with ``predicts`` the last token gives the one behind it."""
        last = block_start - 1 - state.context_length
        branch = self._branch(state, block_start, draft_at=[last] if predicts else [])
        draw = Draw(sampling=state.sampling.greedy(), shift=1, with_probability=False)
        readings = yield Forward(phase="store", branches=(branch,), draw=draw)
        state.context_length = block_start
        if predicts:
            state.commit([block_start - state.prompt_length], readings[0].tokens)

    def _branch(self, state: BlockState, stop: int, *, draft_at: Sequence[int]) -> Branch:
        """Return the text from the end of the cache to ``stop``; each block sees itself and all before it."""
        start = state.context_length
        return Branch(
            tokens=state.text(start, stop),
            positions=range(start, stop),
            order=[position // self.block_size for position in range(start, stop)],
            visible=((0, start),),
            write_at=start,
            draft_at=draft_at,
        )
