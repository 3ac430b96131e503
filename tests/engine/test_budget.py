"""``max_tokens_per_forward`` bounds calls and changes no token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.decoding import Autoregressive, Generation, GenerationCallback, ReFusion, RowState, decode
from refusion_lit.types import SamplingParams
from support.example_counts import examples
from support.fakes import HYBRID, HashModel
from support.scripted import NEXT_TOKEN, make_prompts


@settings(max_examples=examples(24), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    batch_size=st.integers(1, 11),
    budget=st.integers(1, 60),
    seed=st.integers(0, 99),
    causal=st.booleans(),
)
def test_a_budget_bounds_calls_and_changes_no_token(
    lengths: list[int], batch_size: int, budget: int, seed: int, causal: bool
) -> None:
    decoder = Autoregressive() if causal else ReFusion(slot_size=3, slot_threshold=0.3, token_threshold=0.5)
    prompts, sampling = make_prompts(*lengths), SamplingParams(max_new_tokens=12)

    def run(**options: int) -> tuple[HashModel, list[Generation]]:
        model = HashModel(seed, traits=NEXT_TOKEN if causal else HYBRID)
        return model, decode(model, decoder, prompts, sampling, **options).rows

    model, rows = run(batch_size=batch_size, max_tokens_per_forward=budget)
    _, alone = run()
    for row, expected in zip(rows, alone, strict=True):
        assert (row.token_ids, row.forward_shapes) == (expected.token_ids, expected.forward_shapes)
    singles = {shape for row in alone for shape in row.forward_shapes}
    for call in model.calls:
        shape = tuple(call.input_ids.shape)
        assert call.input_ids.numel() <= budget or shape in singles


def test_nobody_starves_within_a_budget() -> None:
    # Two tokens a call, three prompts of one token each: they take turns.
    model = HashModel(3, traits=NEXT_TOKEN, end_bias=-60.0)
    indices: list[int] = []

    class Watch(GenerationCallback):
        def on_commit(self, index: int, state: RowState) -> None:
            indices.append(index)

    sampling = SamplingParams(max_new_tokens=6)
    options = {"batch_size": 3, "max_tokens_per_forward": 2, "callbacks": [Watch()]}
    output = decode(model, Autoregressive(), make_prompts(1, 1, 1), sampling, **options)
    assert output.num_calls == 9
    for stop in range(2, 19, 2):
        counts = [indices[:stop].count(index) for index in range(3)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("budget", "num_calls"), [(1, 18), (2, 9), (3, 6), (4, 6), (1000, 6)])
def test_calls_are_as_large_as_a_budget_lets_them(budget: int, num_calls: int) -> None:
    model = HashModel(3, traits=NEXT_TOKEN, end_bias=-60.0)
    options = {"batch_size": 3, "max_tokens_per_forward": budget}
    output = decode(model, Autoregressive(), make_prompts(1, 1, 1), SamplingParams(max_new_tokens=6), **options)
    assert output.num_calls == num_calls


def test_an_impossible_budget_is_refused() -> None:
    model = HashModel(traits=NEXT_TOKEN)
    with pytest.raises(ValueError, match=r"^max_tokens_per_forward: expected .*, got 0"):
        decode(model, Autoregressive(), make_prompts(1), SamplingParams(), max_tokens_per_forward=0)
