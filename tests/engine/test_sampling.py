"""How a token is drawn from logits: filters, temperature, noise and rejection sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.engine.requests import Branch, Draw
from refusion_lit.engine.sampler import draw_tokens, filter_logits, keep_or_draw, noise_keys
from refusion_lit.modeling.devices import first_argmax
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.types import SamplingParams

LOGITS = st.lists(
    st.one_of(
        st.integers(-300, 300).map(lambda tenths: tenths / 10), st.sampled_from([0.0, 1.0, -math.inf, -1e308, 1e308])
    ),
    min_size=2,
    max_size=9,
).filter(lambda values: max(values) > -math.inf)


def make_keys(number: int) -> Tensor:
    return torch.tensor([stable_key("place", i) for i in range(number)], dtype=torch.long)


def filter_slowly(logits: list[float], sampling: SamplingParams) -> set[int]:
    """Return the tokens that temperature, then top-k, then top-p leave."""
    highest = max(logits)
    scaled = [(value - highest) / sampling.temperature for value in logits]
    kept = [i for i, value in enumerate(scaled) if value > -math.inf]
    if sampling.top_k is not None:
        last = sorted((scaled[i] for i in kept), reverse=True)[: sampling.top_k][-1]
        kept = [i for i in kept if scaled[i] >= last]
    weights = {i: math.exp(scaled[i]) for i in kept}
    nucleus, mass = set(), 0.0
    for i in sorted(kept, key=lambda i: (-weights[i], i)):
        if sampling.top_p < 1 and mass / sum(weights.values()) >= sampling.top_p:
            break
        nucleus.add(i)
        mass += weights[i]
    return nucleus


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_most_probable_token_is_never_dropped(dtype: torch.dtype) -> None:
    """A top_p of 1e-300 is 0 in float32."""
    logits = torch.tensor([[-math.inf, 1.0, 2.0, 2.0]], dtype=dtype)
    sampling = SamplingParams(temperature=1.0, top_p=1e-300)
    assert (filter_logits(logits, sampling) > -math.inf).tolist() == [[False, False, True, False]]
    assert draw_tokens(logits, sampling, make_keys(1)).tolist() == [2]


@settings(max_examples=150, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 7.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 100]),
    top_p=st.sampled_from([1e-9, 0.301, 0.7003, 0.95001, 1.0]),
)
def test_filters_keep_what_a_slow_one_keeps(
    logits: list[float], temperature: float, top_k: int | None, top_p: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    filtered = filter_logits(torch.tensor([logits], dtype=torch.float64), sampling)[0]
    kept = {i for i, value in enumerate(filtered.tolist()) if value > -math.inf}
    assert kept == filter_slowly(logits, sampling)
    probabilities = filtered.softmax(-1)
    expected = [math.exp((logits[i] - max(logits)) / temperature) if i in kept else 0.0 for i in range(len(logits))]
    assert probabilities.tolist() == pytest.approx([value / sum(expected) for value in expected], abs=1e-12)
    tokens = draw_tokens(torch.tensor([logits], dtype=torch.float64), sampling, make_keys(1))
    assert int(tokens) in kept


def test_temperature_zero_takes_the_most_probable_and_the_lower_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-math.inf, -1e38, -1e38]])
    no_keys = make_keys(0)
    tokens = draw_tokens(logits, SamplingParams(temperature=0.0, top_k=1, top_p=0.1), no_keys)
    assert tokens.tolist() == [1, 0, 1]


def test_the_order_of_the_filters_matters() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    sampling = SamplingParams(temperature=0.0, top_k=2, top_p=0.5)
    kept = [filter_logits(probabilities.log(), sampling, top_p_first=first).isfinite().sum() for first in (False, True)]
    assert kept == [1, 2], "of two tokens the first has 4/7 of the probability, of four 4/10"


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, -math.inf, math.inf, math.nan]), min_size=70, max_size=70),
        min_size=1,
        max_size=3,
    ),
    vocab=st.integers(64, 70),
)
def test_the_first_of_the_highest_is_found(rows: list[list[float]], vocab: int) -> None:
    choices = first_argmax(torch.tensor(rows)[:, :vocab]).tolist()
    for index, row in zip(choices, rows, strict=True):
        ranks = [math.inf if math.isnan(value) else min(value, 1e300) for value in row[:vocab]]
        assert index == ranks.index(max(ranks))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, None, 1.0, {0, 1, 2, 3, 4}),
        (0.5, None, 1.0, {0, 1, 2, 3, 4}),
        (2.0, 3, 1.0, {1, 2, 4}),
        (1.0, None, 0.6, {1, 2}),  # of 0.387, 0.235, 0.183, ... the first two reach 0.6
        (1.0, 4, 0.65, {1, 2}),  # top-k first: 0.409 and 0.248 of what it leaves, but 0.387 and 0.235 of all
    ],
)
def test_draws_follow_the_softmax(temperature: float, top_k: int | None, top_p: float, kept: set[int]) -> None:
    values = [0.0, 1.0, 0.5, -1.0, 0.25]
    logits = torch.tensor(values, dtype=torch.float32)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    number = 20000
    tokens = draw_tokens(logits.expand(number, -1), sampling, make_keys(number))
    counts = tokens.bincount(minlength=5).double()
    weights = torch.tensor([math.exp(value / temperature) if i in kept else 0.0 for i, value in enumerate(values)])
    expected = weights.double() / weights.sum() * number
    assert (counts[expected == 0] == 0).all()
    chi_square = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert chi_square < 23.5  # at most 4 degrees of freedom: 1 in 10,000


def test_a_draw_depends_on_its_own_key_alone() -> None:
    logits = torch.randn(40, 11, generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams(temperature=1.0)
    together = draw_tokens(logits, sampling, make_keys(40))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw_tokens(logits[order], sampling, make_keys(40)[order]), together[order])
    assert not torch.equal(draw_tokens(logits, sampling, make_keys(40) + 1), together)


def test_logits_of_any_size_can_be_drawn_from() -> None:
    highest = torch.finfo(torch.float32).max
    logits = torch.tensor([[-highest, highest, highest, -math.inf], [-highest, -highest, -math.inf, -math.inf]])
    for temperature in (1e-30, 1e-3, 1.0, 1e30):
        for top_p in (0.5, 1.0):
            sampling = SamplingParams(temperature=temperature, top_p=top_p)
            tokens = draw_tokens(logits.repeat(50, 1), sampling, make_keys(100))
            assert set(tokens[::2].tolist()) <= ({1, 2} if temperature < 1e30 else {0, 1, 2})
            assert set(tokens[1::2].tolist()) <= {0, 1}


@pytest.mark.parametrize("bits", [0, 2**53 - 1])
def test_the_least_and_the_greatest_noise_are_numbers(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    def constant(self: KeyedNoise, purpose: str, size: int) -> Tensor:
        return torch.full((1, size), bits)

    monkeypatch.setattr(KeyedNoise, "bits", constant)
    tokens = draw_tokens(torch.tensor([[0.0, 1.0, 2.0, -math.inf]]), SamplingParams(temperature=1.0), make_keys(1))
    assert tokens.tolist() == [2], "with equal noise the most probable token is drawn"


SHARES = st.lists(st.sampled_from([0.0, 0.0, 0.1, 1.0, 3.0]), min_size=5, max_size=5).filter(any)


@settings(max_examples=20, deadline=None)
@given(model=SHARES, drafter=SHARES)
def test_rejection_sampling_keeps_the_distribution_and_as_many_drafts_as_possible(
    model: list[float], drafter: list[float]
) -> None:
    number = 20_000
    p, q = (torch.tensor(values, dtype=torch.float64) / sum(values) for values in (model, drafter))
    keys = make_keys(2 * number)
    drafts = draw_tokens(q.log().expand(number, -1), SamplingParams(temperature=1.0), keys[:number])
    tokens = keep_or_draw(p.expand(number, -1), keys[number:], drafts, q.expand(number, -1))
    for token, share in enumerate(p.tolist()):
        error = 5 * (share * (1 - share) / number) ** 0.5
        assert abs((tokens == token).double().mean().item() - share) <= error
    # A rejected draft is never drawn again, so equality counts what is kept.
    optimum = torch.minimum(p, q).sum().item()
    assert abs((tokens == drafts).double().mean().item() - optimum) <= 5 * (0.25 / number) ** 0.5


def test_a_place_without_a_proposal_is_drawn_as_usual() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = draw_tokens(logits, SamplingParams(temperature=1.0), make_keys(50))
    kept = keep_or_draw(logits.softmax(-1), make_keys(50), torch.zeros(50, dtype=torch.long), torch.zeros_like(logits))
    assert drawn.tolist() == kept.tolist()


def test_a_proposal_has_other_noise_than_the_draw_that_replaces_it() -> None:
    branch = Branch(tokens=range(6), positions=range(10, 16), shift=1, draft_at=range(6))
    draws = [Draw(sampling=SamplingParams(temperature=1.0), proposes=proposes) for proposes in (False, True)]
    exact, draft = (set(noise_keys(branch, draw, "prompt")) for draw in draws)
    assert len(draft) == len(exact) == 6
    assert not draft & exact


def test_a_seed_of_any_integer_type_is_the_same_seed() -> None:
    seed = SamplingParams(seed=np.int64(3)).seed  # type: ignore[arg-type]
    assert (seed, type(seed)) == (3, int), "noise is keyed by values and their types"
