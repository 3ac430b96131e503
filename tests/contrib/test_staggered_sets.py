"""Set diffusion's objective: the random orders in which it masks tokens, and its rows against a slow reference.

A token has a random time, and tokens come in the order of falling times.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refusion_lit.contrib import StaggeredSets
from refusion_lit.contrib.set_diffusion import staggered_times
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import SpecialTokens
from support.attention_masks import attention_mask

EOS, MASK = 1, 2
MakeBatch = Callable[..., ResponseBatch]
Noise = Callable[..., KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (8, 8), (5, 4), (2, 16)]


def draw_times(uniform: torch.Tensor, set_size: int, reach: int) -> torch.Tensor:
    """Return the times (row, token) of responses for uniform noise of the same shape."""
    number = uniform.shape[1]
    place = torch.arange(number).expand_as(uniform)
    return staggered_times(place, torch.full((len(uniform), 1), number), uniform, set_size, reach)


def compute_width_and_exponent(number: int, set_size: int, reach: int) -> tuple[float, float]:
    """Return b and k of the paper's masking probability m(t) = 1 - (1 - (t - offset) / b)^k of a token."""
    area = set_size / (2 * number)
    if set_size in (1, reach):
        return 2 * area, 1.0
    width = reach / (number + reach - 1)
    return width, area / (width - area)


@pytest.mark.parametrize(
    ("number", "set_size", "reach"), [(40, 4, 8), (100, 8, 16), (30, 1, 2), (24, 24, 24), (50, 5, 5)]
)
def test_times_follow_the_masking_probability(number: int, set_size: int, reach: int) -> None:
    """The times T(u) invert the masking probability: m(T(u)) = u. The area under m is d / (2 N)."""
    width, k = compute_width_and_exponent(number, set_size, reach)
    assert width * k / (k + 1) == pytest.approx(set_size / (2 * number))
    uniform = torch.rand(50, number, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    times = draw_times(uniform, set_size, reach)
    for i in range(number):
        offset = (1 - width) * (number - 1 - i) / (number - 1)
        probability = 1 - (1 - (times[:, i] - offset) / width) ** k
        torch.testing.assert_close(probability, uniform[:, i])
    assert (times >= 0).all()
    assert (times <= 1).all()


def test_the_example_of_the_released_default() -> None:
    width, k = compute_width_and_exponent(1024, 4, 8)
    assert (width, k) == pytest.approx((0.007759, 0.3364), abs=1e-4)


@pytest.mark.parametrize(("set_size", "reach"), [(4, 8), (3, 12), (1, 8), (6, 6)])
def test_tokens_swap_only_within_reach(set_size: int, reach: int) -> None:
    number = 60
    uniform = torch.rand(4000, number, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    times = draw_times(uniform, set_size, reach)
    swapped = torch.tensor([(times[:, : number - gap] < times[:, gap:]).double().mean() for gap in range(1, number)])
    # If the set size d equals the reach, tokens may swap over d (N - 1) / (N - d) places, a little more than d.
    assert (swapped[reach:] == 0).all()
    if set_size > 1:
        assert swapped[0] > 0.05
    else:
        assert (swapped == 0).all()


def test_one_set_of_all_tokens_is_a_uniform_order() -> None:
    uniform = torch.rand(30, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(draw_times(uniform, 99, 99), uniform)


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize(("set_size", "reach"), [(1, 1), (3, 6), (50, 50)])
def test_equals_the_slow_reference(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens, set_size: int, reach: int,
    multiple: int | None,
) -> None:  # fmt: skip
    batch = make_batch(LENGTHS, width=20)
    noise = make_noise(batch)
    objective = StaggeredSets(set_size=set_size, reach=reach, pad_responses_to=multiple)
    corrupted = objective.corrupt(batch, noise, special_tokens)
    assert attention_mask(corrupted) is not None
    assert corrupted.counts.tolist() == [len(LENGTHS)]
    size = multiple or 1
    responses = [-(-response // size) * size for _, response in LENGTHS]
    num_tokens = max(prompt + response for (prompt, _), response in zip(LENGTHS, responses, strict=True))
    uniform = noise.uniform("masking_time", num_tokens)
    for row, (prompt, given) in enumerate(LENGTHS):
        response = responses[row]
        text = [*batch.input_ids[row, : prompt + given].tolist(), *[EOS] * (response - given)]
        times = draw_times(uniform[row : row + 1, :response], set_size, reach)[0].tolist()
        order = sorted(range(response), key=lambda i: (-times[i], i))
        if set_size == 1:
            assert order == list(range(response))
        places = [*range(prompt), *(prompt + i for i in order)]
        assert corrupted.position_ids[row, : prompt + response].tolist() == places
        assert corrupted.input_ids[row, : prompt + response].tolist() == [text[p] for p in places]
        masks = slice(num_tokens, num_tokens + response)
        assert corrupted.input_ids[row, masks].tolist() == [MASK] * response
        assert corrupted.position_ids[row, masks].tolist() == places[prompt:]
        assert corrupted.labels[row, masks].tolist() == [text[p] for p in places[prompt:]]
        assert corrupted.weights[row, masks].tolist() == pytest.approx([1 / response] * response)
        assert (corrupted.labels[row] != IGNORE_INDEX).sum() == response
        for r in range(prompt + response):
            assert attention_mask(corrupted)[row, r].nonzero()[:, 0].tolist() == list(range(r + 1))
        for r in range(response):
            visible_places = attention_mask(corrupted)[row, num_tokens + r].nonzero()[:, 0].tolist()
            assert visible_places == [*range(prompt + r), num_tokens + r]


@pytest.mark.parametrize("options", [{"set_size": 0}, {"reach": 4}, {"pad_responses_to": 0}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        StaggeredSets(**options)  # type: ignore[arg-type]
