"""Set diffusion: decodes a sliding window of masks that do not see each other; decoded tokens are cached exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require_at_least, require_probability


@dataclass(kw_only=True)
class SetState(RowState):
    """State of set diffusion. The cache holds the prompt, given tokens, then tokens in the order of decoding.

    Attributes:
        new: Places that the last forward decoded, from left to right; the next forward stores them. Before the first
            forward, the places of given tokens.
    """

    new: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SetDiffusion(Decoder):
    """Decodes a set of tokens per forward, chosen by confidence among the first masks of the text.

    A forward feeds the tokens that the last forward decoded, causally after the cache and in text order, and the masks
    within ``window_size`` positions of the first mask. Each mask sees the cache, the new tokens and itself, but no
    other mask. The new tokens stay in the cache: their keys and values are exact and final, since they do not depend on
    tokens decoded later. A forward commits the masks at least as probable as ``threshold`` and always the ``quota``
    most probable ones; then the window moves to the first mask that is left.

    Source: SetDLM (arXiv 2607.01775) and its released program: ``predict_and_noise`` with the leftmost window.
    Deliberate differences: prompt and first window share a forward; the quota is given, not a number of steps; a
    probability is that of the unfiltered softmax, not after top-p; a response ends as soon as everything up to an end
    of sequence is decoded, not every ``window_size`` forwards. Not implemented: orders drawn before decoding, and
    ``posterior`` sampling.

    Attributes:
        window_size: Maximum number of masks that are read, W (``max_window_size``), at least 1.
        threshold: Commit every mask whose token is at least this probable, in [0, 1]; ``None``: the quota alone.
        quota: Minimum number of tokens that a forward commits, at least 1 (response length / ``num_steps``).
    """

    requires: ClassVar[ModelRequirements] = ModelRequirements(attention="causal", predictions=("isolated_mask",))
    shares = "all"
    refuses = None  # given tokens are cached after the prompt, as if they had been decoded first

    window_size: int = 16
    threshold: float | None = 0.9
    quota: int = 1

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        require_at_least("window_size", self.window_size, 1)
        require_at_least("quota", self.quota, 1)
        if self.threshold is not None:
            require_probability("threshold", self.threshold)

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> SetState:
        """Create a canvas as long as the longest response."""
        new = [place for place, token in enumerate(prompt.given) if token is not None]
        return SetState.blank(prompt, sampling, special_tokens, new=new)

    def step(self, state: SetState) -> Steps[None]:  # type: ignore[override]
        """Run one forward over the new tokens and the window's masks, and commit some of the masks."""
        first = state.is_masked.index(True)
        window = range(first, min(first + self.window_size, len(state.tokens)))
        active = [place for place in window if state.is_masked[place]]
        branches = self._branches(state, active)
        draw = Draw(sampling=state.sampling, round=state.num_forwards)
        readings = yield Forward(phase="denoise", branches=branches, draw=draw, packed=True)
        read = readings[-len(active) :]
        state.num_cached = state.prompt_length + state.prompt.num_given + state.num_committed
        probabilities = [reading.probabilities[0] for reading in read]
        threshold = 2.0 if self.threshold is None else self.threshold
        above = [i for i, probability in enumerate(probabilities) if probability >= threshold]
        chosen = sorted({*above, *most_certain(probabilities, self.quota)})
        state.new = [active[i] for i in chosen]
        state.commit(state.new, [read[i].tokens[0] for i in chosen])

    def _branches(self, state: SetState, active: list[int]) -> tuple[Branch, ...]:
        """Return the tokens that are not cached yet, if there are any, and a branch for each mask."""
        start = state.num_cached
        num_prompt = max(state.prompt_length - state.num_cached, 0)
        clean = Branch(
            tokens=[*state.prompt.token_ids[start:], *(state.tokens[place] for place in state.new)],
            positions=[*range(start, start + num_prompt), *(state.prompt_length + place for place in state.new)],
            visible=((0, start),),
            write_at=start,
        )
        known = start + len(clean.tokens)
        masks = [
            Branch(
                tokens=(state.mask_token_id,),
                positions=(state.prompt_length + place,),
                visible=((0, known),),
                write_at=known + i,
                draft_at=(0,),
            )
            for i, place in enumerate(active)
        ]
        return (clean, *masks) if clean.tokens else tuple(masks)
