"""Discrete diffusion forcing against a slow reference, and against what its decoder sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refusion_lit.contrib import D2F, DiffusionForcing
from refusion_lit.decoding import decode
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from support.attention_masks import attention_mask
from support.fakes import SPECIAL, tiny_backbone

EOS, MASK = 1, 2
MakeBatch = Callable[..., ResponseBatch]
Noise = Callable[..., KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (8, 8), (5, 4), (2, 16)]


@pytest.mark.parametrize("ratio", [None, 0.25, 1.0])
@pytest.mark.parametrize("size", [1, 4, 32])
def test_equals_the_slow_reference(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens, ratio: float | None, size: int
) -> None:  # fmt: skip
    batch = make_batch(LENGTHS, width=20)
    noise = make_noise(batch)
    ratios = None if ratio is None else torch.full((len(LENGTHS),), ratio)
    objective = DiffusionForcing(block_size=size, t_min=0.1, t_max=0.8)
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=ratios)
    assert attention_mask(corrupted) is not None
    width = corrupted.input_ids.shape[1]
    draws, chances = noise.uniform("block_ratio", width).tolist(), noise.uniform("token_mask", width).tolist()
    num_masks = 0
    for row, (prompt, response) in enumerate(LENGTHS):
        num_blocks = -(-response // size)
        length = prompt + num_blocks * size
        text = [*batch.input_ids[row, : prompt + response].tolist(), *[EOS] * (length - prompt - response)]
        p = [0.1 + 0.7 * draws[row][0]]
        for b in range(1, num_blocks):
            p.append(p[-1] + draws[row][b] * (0.8 - p[0]) / (num_blocks - 1))
        assert p == sorted(p)
        assert p[-1] <= 0.8
        p = p if ratio is None else [ratio] * num_blocks
        masked = {i for i in range(prompt, length) if chances[row][i] < p[(i - prompt) // size]}
        assert corrupted.input_ids[row, :length].tolist() == [MASK if i in masked else t for i, t in enumerate(text)]
        for i in range(width):
            is_read = i in masked
            num_masks += is_read
            assert int(corrupted.labels[row, i]) == (text[i] if is_read else IGNORE_INDEX)
            weight = 1 / p[(i - prompt) // size] if is_read else 0.0
            assert float(corrupted.weights[row, i]) == pytest.approx(weight)
        for query in range(length):
            for key in range(width):
                blocks = [-1 if i < prompt else (i - prompt) // size for i in (query, key)]
                assert bool(attention_mask(corrupted)[row, query, key]) == (key < length and blocks[1] <= blocks[0])
    assert corrupted.counts.tolist() == [num_masks]


@pytest.mark.parametrize("num_known", [1, 3, 9])
def test_masks_are_predicted_as_in_training(num_known: int) -> None:
    """Two blocks, all masks but one token, give the probabilities of the decoder's second forward."""
    size = 4
    generator = torch.Generator().manual_seed(num_known)
    prompt = torch.randint(3, 14, (num_known,), generator=generator).tolist()
    objective = DiffusionForcing(block_size=size)
    model = tiny_backbone(objective.traits)
    decoder = D2F(block_size=size, threshold=1.0, add_threshold=0.0)
    batch = [Prompt(token_ids=tuple(prompt), id="p")]
    [row] = decode(model, decoder, batch, SamplingParams(max_new_tokens=2 * size), trace=True).rows
    first, second = row.trace[:2]
    [place] = (position - num_known for position in first.accepted)
    token = first.tokens[first.positions.index(first.accepted[0])]

    ids = [*prompt, *[3] * (2 * size)]
    ids[num_known + place] = token
    clean = ResponseBatch(
        input_ids=torch.tensor([ids]), prompt_lengths=torch.tensor([num_known]),
        response_lengths=torch.tensor([2 * size]), sample_keys=torch.tensor([1]),
    )  # fmt: skip
    noise = KeyedNoise.for_samples(clean.sample_keys, seed=0, epoch=0)
    corrupted = objective.corrupt(clean, noise, SPECIAL, mask_ratio=torch.ones(1))
    corrupted.input_ids[0, num_known + place] = token
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)[0]
        probabilities = model.logits(hidden).softmax(-1)
    expected = [
        float(probabilities[position, token]) for position, token in zip(second.positions, second.tokens, strict=True)
    ]
    assert len(expected) == 2 * size - 1
    assert second.probabilities == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"t_min": 0.0}, {"t_max": 0.1}, {"t_max": 1.5}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DiffusionForcing(**options)  # type: ignore[arg-type]
