"""The autoregressive objective against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive
from refusion_lit.types import ModelTraits, SpecialTokens
from support.attention_masks import attention_mask

LENGTHS = [(3, 9), (1, 1), (0, 17), (5, 4)]


def test_loss_is_the_mean_over_response_tokens(
    make_batch: Callable[..., ResponseBatch], make_noise: Callable[..., KeyedNoise], special_tokens: SpecialTokens
) -> None:
    batch = make_batch(LENGTHS, width=20)
    objective = Autoregressive()
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens, mask_ratio=torch.full((4,), 0.5))
    assert torch.equal(corrupted.input_ids, batch.input_ids)
    assert attention_mask(corrupted) is None
    hidden = torch.randn(4, 20, 6, generator=torch.Generator().manual_seed(0))
    head = torch.nn.Linear(6, 50)
    losses = []
    for row, (prompt, response) in enumerate(LENGTHS):
        for place in range(max(prompt, 1), prompt + response):  # the token at a place is 10 + place
            losses.append(F.cross_entropy(head(hidden[row, place - 1])[None], torch.tensor([10 + place])))  # noqa: PERF401
    loss = objective.loss(hidden, head, corrupted)
    assert loss.counts.tolist() == [len(losses)]
    torch.testing.assert_close(loss.total, torch.stack(losses).mean())


def test_no_targets_give_zero(
    make_batch: Callable[..., ResponseBatch], make_noise: Callable[..., KeyedNoise], special_tokens: SpecialTokens
) -> None:
    batch = make_batch([(0, 1)])  # nothing stands before the only token
    objective = Autoregressive()
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens)
    assert objective.loss(torch.randn(1, 1, 6), torch.nn.Linear(6, 50), corrupted).total.item() == 0.0


def test_traits() -> None:
    assert Autoregressive().traits == ModelTraits(attention="causal", predictions=("next_token",))
