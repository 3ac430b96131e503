"""FirstHitting against a slow loop without a cache, and its groups against the law that they are drawn from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.decoding import FirstHitting, decode
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import prompts
from support.example_counts import examples
from support.fakes import MASK, SPECIAL, HashModel
from support.slow_decoding import best_allowed


def draw_groups(decoder: FirstHitting, length: int, *, seed: int = 0, id: str = "0") -> list[list[int]]:
    """Return the places of a response in the groups that the decoder will fill, a group per forward pass."""
    sampling = SamplingParams(max_new_tokens=length, seed=seed)
    return decoder.begin(Prompt(token_ids=(3,), id=id), sampling, SPECIAL).groups


def decode_slowly(model: LanguageModel, prompt: Prompt, groups: list[list[int]], length: int) -> tuple[list[int], int]:
    """Decode groups of places without a cache.

    A forward pass feeds all clean tokens, in the order in which they were decoded, and then the masks of a group.

    Returns:
        The response and the number of forward passes.
    """
    decoded: dict[int, int] = {}
    special, start = model.special_tokens, len(prompt.token_ids)
    for number, group in enumerate(groups):
        row = [*prompt.token_ids, *decoded.values(), *[MASK] * len(group)]
        positions = [*range(start), *(start + place for place in [*decoded, *group])]
        causal = torch.ones(1, len(row), len(row), dtype=torch.bool).tril()
        hidden = model.hidden_states(torch.tensor([row]), torch.tensor([positions]), causal)
        logits = model.logits(hidden[0])[-len(group) :].double()
        tokens = [best_allowed(row, special.banned_token_ids, special.vocab_size) for row in logits]
        decoded.update(zip(group, tokens, strict=True))
        prefix = []
        for place in range(length):
            if place not in decoded:
                break
            prefix.append(decoded[place])
            if decoded[place] in special.eos_token_ids:
                return prefix, number + 1
    return [decoded[place] for place in range(length)], len(groups)


@settings(max_examples=examples(48), deadline=None)
@given(
    seed=st.integers(0, 9999), ends=st.frozensets(st.integers(1, 30), max_size=3), drawn_prompts=prompts(max_size=3),
    num_steps=st.none() | st.integers(1, 9), share=st.sampled_from([0.0, 0.3, 0.75, 1.0]),
    length=st.integers(1, 17), size=st.integers(1, 3),
)  # fmt: skip
def test_text_and_forward_passes_equal_a_loop_without_a_cache(
    seed: int,
    ends: frozenset[int],
    drawn_prompts: list[Prompt],
    num_steps: int | None,
    share: float,
    length: int,
    size: int,
) -> None:
    decoder = FirstHitting(num_steps=num_steps, diffusion_share=share)
    model, other = (HashModel(seed, ends=ends, end_bias=-4.0) for _ in range(2))
    rows = decode(model, decoder, drawn_prompts, SamplingParams(max_new_tokens=length, seed=seed), batch_size=size).rows
    for prompt, row in zip(drawn_prompts, rows, strict=True):
        groups = draw_groups(decoder, length, seed=seed, id=prompt.id)
        assert sorted(place for group in groups for place in group) == list(range(length))
        assert (row.token_ids, row.num_forwards) == decode_slowly(other, prompt, groups, length)


def test_without_a_diffusion_phase_each_token_takes_a_forward_pass() -> None:
    model = HashModel(0, ends=frozenset(), end_bias=-99.0)
    decoder = FirstHitting(diffusion_share=0.0)
    row = decode(model, decoder, [Prompt(token_ids=(5, 6), id="0")], SamplingParams(max_new_tokens=12)).rows[0]
    # The prompt and a mask; then a clean token and a mask, eleven times.
    assert (row.num_forwards, row.num_positions) == (12, 3 + 11 * 2)


def test_sizes_of_groups_follow_the_binomial_law() -> None:
    """The first group has the mean of the binomial law; the share of tokens in groups is ``diffusion_share``."""
    length, num_steps, share = 40, 4, 0.6
    decoder = FirstHitting(num_steps=num_steps, diffusion_share=share)
    # Shares of the tokens that are filled at the times 1 and 1 - 1 / num_steps; time ends at 1e-3.
    begun, after = share * 1e-3, share * (1 - (1 - 1e-3) * (1 - 1 / num_steps))
    chance = (after - begun) / (1 - begun)
    sizes = [len(draw_groups(decoder, length, seed=seed)[0]) for seed in range(600)]
    error = math.sqrt(length * chance * (1 - chance) / len(sizes))
    assert sum(sizes) / len(sizes) == pytest.approx(length * chance, abs=4 * error)
    in_groups = [sum(len(group) for group in draw_groups(decoder, length, seed=seed) if len(group) > 1) / length
                 for seed in range(600)]  # fmt: skip
    assert sum(in_groups) / len(in_groups) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("options", [{"num_steps": 0}, {"diffusion_share": 1.5}])
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FirstHitting(**options)  # type: ignore[arg-type]
