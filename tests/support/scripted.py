"""A decoder that commits scripted places, and helpers that run the decoder on a model with a known text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refusion_lit.decoding import Decoder, Generation, ModelRequirements, RowState, decode
from refusion_lit.engine.decoder import Steps
from refusion_lit.engine.requests import Branch, Draw, Forward
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from support.fakes import MASK, OracleModel, oracle_text

NEXT_TOKEN = ModelTraits(predictions=("next_token",))
"""Traits of a model that predicts next tokens only."""


def make_prompts(*lengths: int) -> list[Prompt]:
    """Return prompts of some lengths, with the ids "p0", "p1", ..."""
    return [Prompt(token_ids=tuple(3 + i % 5 for i in range(length)), id=f"p{n}") for n, length in enumerate(lengths)]


def decode_letters(token_ids: Sequence[int], **_: object) -> str:
    """Return a text with a letter for each token: "a" for the id 0, "b" for 1, ..."""
    return "".join(chr(ord("a") + token) for token in token_ids)


@dataclass(frozen=True, kw_only=True)
class Scripted(Decoder):
    """Commits given places in each step, with a forward pass per step.

    Attributes:
        script: For each step the places to commit. The decoder finishes after the last step.
        schedule_length: Maximum number of forward passes that commit nothing.
    """

    requires = ModelRequirements(attention="causal", predictions=("mask",))

    script: tuple[tuple[int, ...], ...]
    schedule_length: int = 0

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        return RowState(prompt, sampling, special_tokens, schedule_length=self.schedule_length)

    def step(self, state: RowState) -> Steps:
        places = self.script[state.num_forwards]
        start = state.prompt_length
        branch = Branch(
            tokens=[*state.prompt.token_ids, *[MASK] * len(state.tokens)],
            positions=range(start + len(state.tokens)),
            draft_at=[start + place for place in places],
        )
        readings = yield Forward(
            phase=f"step {state.num_forwards}", branches=(branch,), draw=Draw(sampling=state.sampling), cached=False
        )
        state.commit(places, readings[0].tokens)
        state.finished = state.num_forwards == len(self.script)


def decode_one_prompt(decoder: Decoder, max_new_tokens: int, end: int | None = None, **options: Any) -> Generation:
    """Decode a prompt of two tokens; the oracle's text has an EOS token at position ``end``."""
    model = OracleModel(oracle_text(end))
    [row] = decode(model, decoder, make_prompts(2), SamplingParams(max_new_tokens=max_new_tokens), **options).rows
    return row
