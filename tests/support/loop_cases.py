"""Random prompts and models on which a decoder is compared with a loop that decodes a prompt alone, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from refusion_lit.decoding import Decoder, decode
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import prompts, traits_for
from support.fakes import HashModel

Loop = Callable[[LanguageModel, tuple[int, ...], Any, int], tuple[list[int], int]]
"""Decodes a prompt with a model, a decoder's options and a limit; returns its text and the number of forwards."""


@dataclass(frozen=True, kw_only=True)
class LoopCase:
    """Prompts, a model and limits.

    Attributes:
        seed: Seed of the model.
        ends: Positions at which the model prefers an EOS token.
        requests: The prompts.
        length: Maximum number of new tokens.
        batch_size: Number of prompts that are decoded together.
    """

    seed: int
    ends: frozenset[int]
    requests: list[Prompt]
    length: int
    batch_size: int

    def check(self, decoder: Decoder, loop: Loop) -> None:
        """Assert that a decoder gives the texts and numbers of forward passes of a loop."""
        options = {"ends": self.ends, "end_bias": -4.0, "traits": traits_for(decoder)}
        model, slow = (HashModel(self.seed, **options) for _ in range(2))
        sampling = SamplingParams(max_new_tokens=self.length)
        rows = decode(model, decoder, self.requests, sampling, batch_size=self.batch_size).rows
        for prompt, row in zip(self.requests, rows, strict=True):
            assert (row.token_ids, row.num_forwards) == loop(slow, prompt.token_ids, decoder, self.length)


def loop_cases() -> st.SearchStrategy[LoopCase]:
    """Return short cases with up to three prompts."""
    return st.builds(
        LoopCase, seed=st.integers(0, 9999), ends=st.frozensets(st.integers(1, 30), max_size=3),
        requests=prompts(max_size=3), length=st.integers(1, 17), batch_size=st.integers(1, 3),
    )  # fmt: skip
