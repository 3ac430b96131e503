"""Masked diffusion against slow references and the laws of its noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from refusion_lit.families.llada.objective import cart_weights
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Masked
from refusion_lit.types import ModelTraits, SpecialTokens
from support.attention_masks import attention_mask

PAD, EOS, MASK = 0, 1, 2
Noise = Callable[..., KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (5, 4), (2, 16)]


def slow_cart(tokens: list[int | None], place: int, p: float) -> float:
    """Return the CART weight of the mask at a place: the nearer the clean tokens, the larger the weight.

    A clean token at distance d adds p (1 - p)^(d - 1) / 2. ``None`` stands for a mask.
    """
    total = 0.0
    for other, token in enumerate(tokens):
        if token is not None:
            assert other != place
            total += p * (1 - p) ** (abs(place - other) - 1)
    return total / 2


@pytest.mark.parametrize("ratio", [None, 0.25, 1.0])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("cart_p", [None, 0.3, 1.0])
@pytest.mark.parametrize("multiple", [None, 8])
def test_equals_the_slow_reference(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Noise,
    special_tokens: SpecialTokens,
    ratio: float | None,
    shifted: bool,
    cart_p: float | None,
    multiple: int | None,
) -> None:
    batch = make_batch(LENGTHS, width=22)
    noise = make_noise(batch)
    ratios = None if ratio is None else torch.full((len(LENGTHS),), ratio)
    objective = Masked(shifted=shifted, cart_p=cart_p, pad_responses_to=multiple)
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=ratios)
    uniform, t = noise.uniform("token_mask", 60), noise.uniform("mask_ratio", 1)[:, 0]

    width = corrupted.input_ids.shape[1]
    for row, (prompt, response) in enumerate(LENGTHS):
        text = list(range(10, 10 + prompt + response))
        while multiple and (len(text) - prompt) % multiple:
            text.append(EOS)
        p = ratio or 0.999 * t[row].item() + 0.001
        masked = [place for place in range(prompt, len(text)) if uniform[row, place].item() < p]
        visible = [None if place in masked else token for place, token in enumerate(text)]
        labels, weights = [IGNORE_INDEX] * width, [0.0] * width
        for place in masked:
            weight = 1 / p if cart_p is None else slow_cart(visible, place, cart_p)
            target = place - 1 if shifted else place
            if target >= 0:
                labels[target], weights[target] = text[place], weight / (len(text) - prompt)
        padding = [PAD] * (width - len(text))
        assert corrupted.input_ids[row].tolist() == [MASK if x is None else x for x in visible] + padding
        assert corrupted.position_ids[row].tolist() == list(range(width))
        assert corrupted.labels[row].tolist() == labels
        assert corrupted.weights[row].tolist() == pytest.approx(weights, rel=1e-5)
        assert corrupted.is_masked is not None
        assert corrupted.is_masked[row].nonzero()[:, 0].tolist() == masked
        assert attention_mask(corrupted) is not None
        for query in range(width):
            visible_places = attention_mask(corrupted)[row, query].nonzero()[:, 0].tolist()
            assert visible_places == list(range(len(text)))
    assert corrupted.counts.tolist() == [len(LENGTHS)]
    assert objective.terms == {"mdm": 1.0}


def test_tokens_are_masked_independently_with_the_given_ratio(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Noise,
    special_tokens: SpecialTokens,
    chi_square: Callable[..., float],
) -> None:
    batch = make_batch([(1, 3)] * 20_000)
    corrupted = Masked().corrupt(batch, make_noise(batch), special_tokens, mask_ratio=torch.full((20_000,), 0.7))
    assert corrupted.is_masked is not None
    patterns = Counter(map(tuple, corrupted.is_masked[:, 1:].tolist()))
    keys = [*product((False, True), repeat=3)]
    expected = [20_000 * 0.7 ** sum(key) * 0.3 ** (3 - sum(key)) for key in keys]
    assert chi_square([patterns[key] for key in keys], expected) < 24.3  # 7 degrees of freedom, p = 0.001


def test_mask_ratio_is_uniform_when_drawn(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Noise,
    special_tokens: SpecialTokens,
    chi_square: Callable[..., float],
) -> None:
    batch = make_batch([(1, 5)] * 20_000)
    corrupted = Masked(eps=1e-9).corrupt(batch, make_noise(batch), special_tokens)
    assert corrupted.is_masked is not None
    counts = Counter(corrupted.is_masked.sum(1).tolist())
    assert chi_square([counts[number] for number in range(6)], [20_000 / 6] * 6) < 20.5  # 5 degrees of freedom


def test_expected_loss_is_the_mean_cross_entropy_where_it_does_not_depend_on_masks(
    make_batch: Callable[..., ResponseBatch], make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    # 1 / p undoes the masking probability: with cross-entropy 1 everywhere the loss is 1 on average.
    batch = make_batch([(2, 6), (1, 3)] * 10_000)
    corrupted = Masked(eps=0.05).corrupt(batch, make_noise(batch), special_tokens)
    assert corrupted.weights.sum().item() / corrupted.counts.item() == pytest.approx(1.0, abs=0.02)


def test_cart_weights_on_paper() -> None:
    # Places 0 1 2 3 4, masks at 1 and 2: p (1 - p)^(d - 1) is 0.5, 0.25, 0.125 for distances 1, 2, 3.
    is_clean = torch.tensor([[True, False, False, True, True]])
    weights = cart_weights(is_clean, 0.5)[0]
    assert weights[1].item() == pytest.approx(0.5 * (0.5 + 0.25 + 0.125))
    assert weights[2].item() == pytest.approx(0.5 * (0.25 + 0.5 + 0.25))


def test_padding_of_responses_is_the_first_end_of_sequence(
    make_batch: Callable[..., ResponseBatch], make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    batch = make_batch([(2, 3)])
    several = replace(special_tokens, eos_token_ids=(7, 8))
    corrupted = Masked(pad_responses_to=5).corrupt(batch, make_noise(batch), several, mask_ratio=torch.ones(1))
    assert corrupted.labels[0, -2:].tolist() == [7, 7]


@pytest.mark.parametrize(
    "options",
    [{"eps": 0.0}, {"pad_responses_to": 0}, {"cart_p": 0.0}, {"cart_p": -0.5}, {"cart_p": 1.1}, {"chunk_size": -1}],
)
def test_impossible_options_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Masked(**options)


def test_traits() -> None:
    assert Masked().traits == ModelTraits(attention="bidirectional", predictions=("mask",))
    assert Masked(shifted=True).traits == ModelTraits(attention="bidirectional", predictions=("mask_shifted",))
