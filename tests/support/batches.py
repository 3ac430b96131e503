"""Fixtures that make training batches in which every token is different."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import SpecialTokens

PAD, EOS, MASK = 0, 1, 2
MakeBatch = Callable[..., ResponseBatch]


@pytest.fixture
def special_tokens() -> SpecialTokens:
    """Ids 0, 1 and 2 for padding, end of sequence and mask."""
    return SpecialTokens(mask_token_id=MASK, eos_token_ids=(EOS,), pad_token_id=PAD, vocab_size=10_000)


@pytest.fixture
def make_batch() -> MakeBatch:
    """Return a maker of batches from (prompt length, response length) pairs; all tokens of a row differ."""

    def make(lengths: Sequence[tuple[int, int]], *, width: int | None = None, first_key: int = 0) -> ResponseBatch:
        width = width or max(prompt + response for prompt, response in lengths)
        input_ids = torch.full((len(lengths), width), PAD)
        for row, (prompt, response) in enumerate(lengths):
            length = prompt + response
            input_ids[row, :length] = 10 + torch.arange(length)
        prompts, responses = torch.tensor(lengths).unbind(1)
        keys = torch.arange(first_key, first_key + len(lengths)) * 7919  # a prime, so keys are no small neighbours
        return ResponseBatch(input_ids=input_ids, prompt_lengths=prompts, response_lengths=responses, sample_keys=keys)

    return make


@pytest.fixture
def make_noise() -> Callable[[ResponseBatch], KeyedNoise]:
    """Return a maker of a batch's training noise."""
    return lambda batch, epoch=0: KeyedNoise.for_samples(batch.sample_keys, seed=1, epoch=epoch)


@pytest.fixture
def chi_square() -> Callable[[Sequence[float], Sequence[float]], float]:
    """Return the statistic of observed and expected counts."""
    return lambda observed, expected: sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
