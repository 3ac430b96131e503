"""CARD: fills blocks of masks by confidence, on a causal model in which tokens and masks predict the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, above_or_best
from refusion_lit.engine.requests import Draw, Forward, Steps
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require_at_least, require_probability


@dataclass(kw_only=True)
class CARDState(RowState):
    """State of CARD.

    Attributes:
        num_rounds: Forwards of the current block so far.
    """

    num_rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class CARD(Decoder):
    """Fills blocks of masks from left to right, several tokens a forward, with an exact cache of finished blocks.

    A forward feeds the token before the block and the block's tokens and masks up to the last mask but one: the token
    before a mask predicts it. Every mask more probable than ``threshold`` is filled, and always the best one. Filled
    tokens never change. Attention is causal, so a token that is filled to the right of a mask does not help that mask.
    The first forward of a block also computes the finished block before it, whose keys and values then are those of
    ordinary causal decoding. With ``block_size: 1`` it equals :class:`Autoregressive`.

    Source: CARD (arXiv 2601.22031), after third-party notes and re-implementations: neither the paper nor the authors'
    code was available, and their settings are unknown. Deliberate differences: the best mask is always filled,
    so that each forward commits a token; the token that the last mask predicts, beyond the block, is not used.

    Attributes:
        block_size: Masks of a block, K, at least 1.
        threshold: Fill every mask whose token has a higher probability (tau), in [0, 1].
        max_rounds: Maximum number of forwards of a block (T_max); the last one fills all remaining masks. ``None``: no
            bound.
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(
        attention="causal", predictions=("mask_shifted", "next_token")
    )
    shares = "all_but_last"
    refuses = "its masks see no text on their right"

    block_size: int = 16
    threshold: float = 0.9
    max_rounds: int | None = 8

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        require_at_least("block_size", self.block_size, 1)
        require_probability("threshold", self.threshold)
        require_at_least("max_rounds", self.max_rounds, 1, optional=True)

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> CARDState:
        """Create a canvas of ``max_new_tokens``."""
        return CARDState.blank(prompt, sampling, special_tokens)

    def step(self, state: CARDState) -> Steps[None]:  # type: ignore[override]
        """Run one forward over the block and fill masks."""
        start = state.is_masked.index(True) // self.block_size * self.block_size
        block = range(start, min(start + self.block_size, len(state.tokens)))
        masked = [place for place in block if state.is_masked[place]]
        positions = [state.prompt_length + place for place in masked]
        branch = state.branch(state.num_cached, positions[-1], positions, shift=1)
        draw = Draw(sampling=state.sampling, round=state.num_forwards)
        reading = (yield Forward(phase="denoise", branches=(branch,), draw=draw))[0]
        state.num_rounds += 1
        is_last = state.num_rounds == self.max_rounds
        chosen = range(len(masked)) if is_last else above_or_best(reading.probabilities, self.threshold)
        state.commit([masked[i] for i in chosen], [reading.tokens[i] for i in chosen])
        state.num_cached = state.prompt_length + start
        if len(chosen) == len(masked):
            state.num_rounds = 0
        else:
            state.num_cached -= 1  # the block's first mask is predicted by the token before it
