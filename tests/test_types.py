from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.types import (
    IGNORE_INDEX,
    CorruptedBatch,
    Example,
    LossOutput,
    ModelTraits,
    Prompt,
    PromptBatch,
    ResponseBatch,
    SamplingParams,
    SpecialTokens,
)


@pytest.mark.parametrize(
    "traits",
    [
        ModelTraits(),
        ModelTraits(attention="bidirectional", predictions=("mask",)),
        ModelTraits(attention="block_causal", block_size=8, predictions=("mask_shifted", "next_token")),
        ModelTraits(predictions=()),
    ],
)
def test_traits_survive_json(traits: ModelTraits) -> None:
    values = json.loads(json.dumps(traits.to_dict()))
    assert ModelTraits.from_dict(values) == traits
    assert ModelTraits.from_dict({**values, "of_a_later_version": 1}) == traits


def test_a_directory_that_says_nothing_is_causal_and_unknown() -> None:
    assert ModelTraits.from_dict({}) == ModelTraits(attention="causal", block_size=None, predictions=None)


@pytest.mark.parametrize(
    "options", [{"attention": "block_causal"}, {"block_size": 4}, {"attention": "bidirectional", "block_size": 4}]
)
def test_a_block_size_goes_with_block_causal_attention(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^block_size: expected a value exactly with attention 'block_causal'"):
        ModelTraits(**options)


@pytest.mark.parametrize(
    ("mask", "eos", "pad", "banned"),
    [
        (2, (1,), 0, (0, 2)),
        (2, (1,), 1, (2,)),  # padding that ends a response is drawn
        (None, (1,), 0, (0,)),
        (None, (1,), 1, ()),
        (0, (1, 5), 5, (0,)),
        (7, (1,), 7, (7,)),
    ],
)
def test_mask_and_padding_are_never_drawn(
    mask: int | None, eos: tuple[int, ...], pad: int, banned: tuple[int, ...]
) -> None:
    special = SpecialTokens(mask_token_id=mask, eos_token_ids=eos, pad_token_id=pad, vocab_size=9)
    assert special.banned_token_ids == banned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "^max_new_tokens: expected an integer of at least 1, got 0"),
        ({"max_new_tokens": -3}, "^max_new_tokens: expected an integer of at least 1, got -3"),
        ({"temperature": -0.1}, "^temperature: expected 0, or a number from 1e-30 to 1e30, got -0.1"),
        ({"temperature": 1e-40}, "^temperature: expected .*, got 1e-40"),
        ({"temperature": math.inf}, "^temperature: expected .*, got inf"),
        ({"temperature": math.nan}, "^temperature: expected .*, got nan"),
        ({"top_p": 0.0}, r"^top_p: expected a number in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"^top_p: expected a number in \(0, 1\], got 1.01"),
        ({"top_k": 0}, "^top_k: expected an integer of at least 1, or null, got 0"),
    ],
)
def test_impossible_sampling_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_greedy_sampling_keeps_the_rest() -> None:
    sampling = SamplingParams(max_new_tokens=7, temperature=0.8, top_p=0.5, top_k=3, seed=4, stop=("x",))
    greedy = sampling.greedy()
    assert greedy == SamplingParams(max_new_tokens=7, temperature=0.0, top_p=0.5, top_k=3, seed=4, stop=("x",))
    assert sampling.temperature == 0.8
    with pytest.raises(FrozenInstanceError):
        sampling.seed = 5  # type: ignore[misc]


def loss_of(sums: list[float], counts: list[float], coefficients: tuple[float, ...]) -> LossOutput:
    names = tuple(f"term{i}" for i in range(len(sums)))
    return LossOutput(
        sums=torch.tensor(sums, requires_grad=True), counts=torch.tensor(counts), coefficients=coefficients, names=names
    )


def test_a_loss_without_targets_is_zero_with_gradients() -> None:
    loss = loss_of([6.0, 0.0], [3.0, 0.0], (2.0, 5.0))
    assert loss.means.tolist() == [2.0, 0.0]
    loss.total.backward()
    assert loss.total.item() == 4.0
    assert loss.sums.grad is not None
    assert loss.sums.grad.isfinite().all()
    assert loss.named_means() == {"term0": torch.tensor(2.0), "term1": torch.tensor(0.0)}
    assert not loss.named_means()["term0"].requires_grad
    empty = loss_of([0.0, 0.0], [0.0, 0.0], (1.0, 1.0))
    assert empty.total.item() == 0.0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9)), min_size=1, max_size=6))
def test_sums_and_counts_of_parts_give_the_mean_of_the_whole(parts: list[tuple[float, int]]) -> None:
    parts = [(value if count else 0.0, count) for value, count in parts]
    whole = loss_of([sum(value for value, _ in parts)], [sum(count for _, count in parts)], (1.0,))
    total = sum(count for _, count in parts)
    expected = sum(value for value, _ in parts) / total if total else 0.0
    assert whole.total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def response_batch() -> ResponseBatch:
    return ResponseBatch(
        input_ids=torch.zeros(2, 5, dtype=torch.long),
        prompt_lengths=torch.tensor([2, 1]),
        response_lengths=torch.tensor([3, 1]),
        sample_keys=torch.tensor([7, 8]),
        ids=["a", "b"],
    )


def test_tokens_of_a_batch_are_counted_without_padding() -> None:
    assert response_batch().num_tokens == 7


@pytest.mark.parametrize("mask", [None, torch.ones(2, 5, 5, dtype=torch.bool)])
def test_batches_move_as_a_whole(mask: torch.Tensor | None) -> None:
    moved = response_batch().to("meta")
    tensors = (moved.input_ids, moved.prompt_lengths, moved.response_lengths, moved.sample_keys)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.ids == ["a", "b"]
    ids = torch.zeros(2, 5, dtype=torch.long)
    corrupted = CorruptedBatch(
        input_ids=ids,
        position_ids=ids,
        labels=ids.fill_(IGNORE_INDEX),
        weights=ids.float(),
        terms=ids,
        term_names=("a",),
        counts=torch.ones(1),
        coefficients=(1.0,),
        attention_mask=mask,
        is_masked=ids.bool(),
    ).to("meta")
    for name, value in vars(corrupted).items():
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta", name
    assert (corrupted.attention_mask is None) == (mask is None)
    assert corrupted.term_names == ("a",)


def test_prompts_stay_where_they_are() -> None:
    batch = PromptBatch(
        prompts=[Prompt(token_ids=(1, 2), id="a")], examples=[Example(id="a", query="q", response="r")]
    )  # fmt: skip
    assert batch.to("meta") is batch
