"""WeDLM: fills a sliding window of masks in parallel on a causal model and caches filled tokens from the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, max_length
from refusion_lit.engine.requests import Branch, Draw, Forward, Reading, Steps
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class WeDLM(Decoder):
    """Fills the masks of a sliding window by entropy and caches the leading run of filled ones one forward later.

    A forward feeds the window's filled tokens in text order and then its masks in text order, with their positions in
    the text. Causal attention over that sequence shows each mask all filled tokens and the masks to its left. A filled
    token never changes. The run of filled tokens at the window's start follows cached text directly. Its keys and
    values in this forward are therefore those of ordinary causal decoding: they stay in the cache, and the window moves
    past them. Other filled tokens are computed again in each forward.

    Source: streaming parallel decoding of WeDLM (arXiv 2512.22737, algorithm 1) as in its released engine. Deliberate
    differences: the first forward computes the prompt and the first window, where the engine computes the prompt alone;
    no forward follows the one that completes the text; temperature acts before top-p, not after; the mask token is
    never drawn. As in the engine, the window is refilled in the same forward that caches its leading tokens: there are
    always W masks, and up to 2 W tokens (the paper's algorithm refills it after that forward). The window reaches
    beyond ``max_new_tokens``; what stands there is not returned.

    Attributes:
        window_size: Masks in the window, W (``wedlm_window_size``); the paper's tables have 6.
        entropy_threshold: Fill every mask whose entropy in nats plus penalty is below this, and always the best one
            (tau, ``wedlm_entropy_threshold``); the comparison is strict. ``None``: one token per forward, as in the
            paper's tables.
        position_penalty: Added to a mask's entropy for each position between it and the first mask (lambda,
            ``wedlm_pos_penalty_factor``), at least 0; the paper's tables have 0.1.
        ignore_right_context: Accept given tokens beyond the window of a token to generate, which the model does not see
            while it fills that one.
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(attention="causal", predictions=("mask",))
    shares = "all"

    ranges = {"window_size": 1, "entropy_threshold": "[-inf, inf]", "position_penalty": 0.0}
    window_size: int = 16
    entropy_threshold: float | None = 0.4
    position_penalty: float = 0.02
    ignore_right_context: bool = False

    def refusal(self, prompt: Prompt) -> str | None:
        """Refuse given tokens that the first window does not reach, unless ``ignore_right_context``."""
        if self.ignore_right_context or not prompt.num_to_fill:
            return None
        if prompt.given_length - 1 - prompt.given.index(None) < self.window_size:
            return None
        return (
            f"its model sees a window of {self.window_size} tokens and what is before it, and text is given after that "
            "(set ignore_right_context: true to fill spans without it)"
        )

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a canvas as long as the longest response, and the window's masks beyond."""
        length = max_length(prompt, sampling, special_tokens) + self.window_size
        return RowState.blank(prompt, sampling, special_tokens, length)

    def step(self, state: RowState) -> Steps[None]:
        """Run one forward over the window; fill masks and keep the KV cache entries of the leading tokens."""
        start = max(state.num_cached - state.prompt_length, 0)
        first_mask = state.is_masked.index(True)
        stop = first_mask + self.window_size
        places = [place for place in range(start, stop) if state.is_masked[place]]
        branch = self._branch(state, [place for place in range(start, stop) if not state.is_masked[place]], places)
        draw = Draw(sampling=state.sampling, round=state.num_forwards, statistics=("entropy",))
        readings = yield Forward(phase="denoise", branches=(branch,), draw=draw)
        state.num_cached = state.prompt_length + first_mask
        chosen = self._choose(places, readings[0])
        state.commit([places[i] for i in chosen], [readings[0].tokens[i] for i in chosen])

    def _branch(self, state: RowState, filled: Sequence[int], masked: Sequence[int]) -> Branch:
        """Return the prompt's tokens that are not cached, the window's filled tokens, then its masks."""
        num_prompt = max(state.prompt_length - state.num_cached, 0)
        num_known = num_prompt + len(filled)
        return Branch(
            tokens=[
                *state.prompt.token_ids[state.num_cached :],
                *(state.tokens[place] for place in filled),
                *([state.mask_token_id] * len(masked)),
            ],
            positions=[
                *range(state.num_cached, state.num_cached + num_prompt),
                *(state.prompt_length + place for place in (*filled, *masked)),
            ],
            visible=((0, state.num_cached),),
            write_at=state.num_cached,
            draft_at=range(num_known, num_known + len(masked)),
        )

    def _choose(self, places: Sequence[int], reading: Reading) -> list[int]:
        """Return the indices of the masks that are filled: those below the threshold, or the best one."""
        entropies = reading.statistics["entropy"]
        penalised = [
            entropy + self.position_penalty * (place - places[0])
            for place, entropy in zip(places, entropies, strict=True)
        ]
        below = [i for i, value in enumerate(penalised) if self.entropy_threshold is not None
                 and value < self.entropy_threshold]  # fmt: skip
        return below or [min(range(len(penalised)), key=lambda i: penalised[i])]
