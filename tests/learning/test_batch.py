"""Batches and losses of a training step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput, ResponseBatch


def make_loss(sums: list[float], counts: list[float], coefficients: tuple[float, ...]) -> LossOutput:
    terms = {f"term{i}": coefficient for i, coefficient in enumerate(coefficients)}
    return LossOutput(
        sums=torch.tensor(sums, requires_grad=True), counts=torch.tensor(counts, dtype=torch.float32), terms=terms
    )


def test_a_loss_without_targets_is_zero_with_gradients() -> None:
    loss = make_loss([6.0, 0.0], [3.0, 0.0], (2.0, 5.0))
    assert loss.means.tolist() == [2.0, 0.0]
    loss.total.backward()
    assert loss.total.item() == 4.0
    assert loss.sums.grad is not None
    assert loss.sums.grad.isfinite().all()
    assert loss.named_means() == {"term0": torch.tensor(2.0), "term1": torch.tensor(0.0)}
    assert not loss.named_means()["term0"].requires_grad
    empty = make_loss([0.0, 0.0], [0.0, 0.0], (1.0, 1.0))
    assert empty.total.item() == 0.0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9)), min_size=1, max_size=6))
def test_sums_and_counts_of_parts_give_the_mean_of_the_whole(parts: list[tuple[float, int]]) -> None:
    parts = [(value if count else 0.0, count) for value, count in parts]
    whole = make_loss([sum(value for value, _ in parts)], [sum(count for _, count in parts)], (1.0,))
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


def test_bidirectional_attention_shows_each_token_all_of_its_own_text() -> None:
    assert response_batch().bidirectional.tolist() == [[[[0, 5]]] * 5, [[[0, 2]]] * 5]


@pytest.mark.parametrize("visible", [None, torch.ones(2, 5, 1, 2, dtype=torch.long)])
def test_batches_move_as_a_whole(visible: torch.Tensor | None) -> None:
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
        counts=torch.ones(1),
        visible=visible,
        is_masked=ids.bool(),
    ).to("meta")
    for name, value in vars(corrupted).items():
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta", name
    assert (corrupted.visible is None) == (visible is None)
    assert corrupted.num_views == 1
