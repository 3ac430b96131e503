"""A decoder that drafts the whole response at once and keeps it."""

from dataclasses import dataclass
from typing import ClassVar

from refusion_lit.decoding import Decoder, ModelRequirements, RowState
from refusion_lit.decoding.base import Steps
from refusion_lit.decoding.requests import Branch, Draw, Forward
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class OneShot(Decoder):
    """Every token from one forward over the prompt and masks."""

    requires: ClassVar[ModelRequirements] = ModelRequirements(attention="causal", predictions=("mask",))

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Make a canvas of ``max_new_tokens`` masks."""
        length = sampling.max_new_tokens
        return RowState(
            prompt=prompt,
            sampling=sampling,
            special_tokens=special_tokens,
            tokens=[0] * length,
            is_masked=[True] * length,
        )

    def step(self, state: RowState) -> Steps:
        """Draft everything and commit it."""
        prompt, length = state.prompt.token_ids, len(state.tokens)
        mask = state.special_tokens.mask_token_id
        assert mask is not None  # the engine has checked it
        branch = Branch(
            tokens=[*prompt, *[mask] * length],
            positions=range(len(prompt) + length),
            draft_at=range(len(prompt), len(prompt) + length),
        )
        readings = yield Forward(phase="draft", branches=(branch,), draw=Draw(sampling=state.sampling))
        state.commit(range(length), readings[0].tokens)
        state.finished = True
