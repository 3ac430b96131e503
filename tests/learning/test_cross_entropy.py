"""The chunked loss equals the plain one, and looks at labelled positions only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from refusion_lit.learning import objective
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, LossOutput
from refusion_lit.learning.objective import Head
from refusion_lit.objectives import Autoregressive

VOCAB, HIDDEN = 11, 6


class CountingHead(nn.Module):
    """A linear head that remembers how many positions each call had."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)
        self.calls: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the head."""
        if len(hidden):
            self.calls.append(len(hidden))
        return self.linear(hidden)


def make_inputs(labelled: float = 0.6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, labels, weights and terms."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 9, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCAB, (3, 9), generator=generator)
    labels[torch.rand(3, 9, generator=generator) >= labelled] = IGNORE_INDEX
    weights = torch.rand(3, 9, dtype=dtype, generator=generator)
    weights[labels == IGNORE_INDEX] = float("nan")  # must have no influence
    terms = torch.randint(0, 2, (3, 9), generator=generator)
    return hidden, labels, weights, terms


def plain_sums(hidden: Tensor, head: nn.Module, labels: Tensor, weights: Tensor, terms: Tensor) -> Tensor:
    """Go through all positions one by one."""
    sums = [torch.zeros((), dtype=hidden.dtype) for _ in range(2)]
    for row in range(labels.shape[0]):
        for place in range(labels.shape[1]):
            if labels[row, place] != IGNORE_INDEX:
                loss = F.cross_entropy(head(hidden[row, place][None]), labels[row, place][None])
                term = int(terms[row, place])
                sums[term] = sums[term] + weights[row, place] * loss
    return torch.stack(sums)


def loss_sums(
    hidden: Tensor, head: Head, labels: Tensor, weights: Tensor, terms: Tensor, num_terms: int = 2,
    chunk_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the sums of the loss that all objectives share."""
    corrupted = CorruptedBatch(
        input_ids=labels, position_ids=labels, labels=labels, weights=weights, terms=terms, counts=torch.ones(num_terms)
    )
    return Autoregressive(chunk_size=chunk_size).loss(hidden, head, corrupted).sums


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 1000, None])
def test_chunks_give_the_plain_sums_and_gradients(chunk_size: int | None) -> None:
    hidden, labels, weights, terms = make_inputs()
    head = CountingHead()
    expected = plain_sums(hidden, head, labels, weights, terms)
    expected_gradients = torch.autograd.grad(expected @ expected.new_tensor([1.0, 2.0]), (hidden, head.linear.weight))
    sums = loss_sums(hidden, head, labels, weights, terms, chunk_size=chunk_size)
    gradients = torch.autograd.grad(sums @ sums.new_tensor([1.0, 2.0]), (hidden, head.linear.weight))
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


def test_head_sees_labelled_positions_in_chunks() -> None:
    hidden, labels, weights, terms = make_inputs()
    num_labelled = int((labels != IGNORE_INDEX).sum())
    head = CountingHead()
    with torch.no_grad():
        loss_sums(hidden, head, labels, weights, terms, chunk_size=4)
    assert max(head.calls) == 4
    assert sum(head.calls) == num_labelled

    head.calls.clear()
    loss_sums(hidden, head, labels, weights, terms, chunk_size=4).sum().backward()
    assert sum(head.calls) == 2 * num_labelled, "logits of several chunks are recomputed, not kept"

    head.calls.clear()
    loss_sums(hidden, head, labels, weights, terms, chunk_size=100).sum().backward()
    assert head.calls == [num_labelled], "one chunk needs no recomputation"


def test_default_chunk_fills_64_megabytes_in_float32() -> None:
    calls = []

    def head(values: torch.Tensor) -> torch.Tensor:
        calls.append(len(values))
        return torch.zeros(len(values), 2**16)  # a position's logits take 2**18 bytes, 256 positions 2**26

    places, labels = torch.zeros(1, 257), torch.zeros(1, 257, dtype=torch.long)
    with torch.no_grad():
        loss_sums(torch.zeros(1, 257, 2), head, labels, places, labels, num_terms=1)
    assert [num for num in calls if num] == [256, 1]


def test_default_chunk_keeps_logits_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "LOGITS_BYTES", 3 * VOCAB * 4 + 1)
    hidden, labels, weights, terms = make_inputs()
    head = CountingHead()
    with torch.no_grad():
        loss_sums(hidden, head, labels, weights, terms)
    assert max(head.calls) == 3


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_no_labels_give_zero_and_zero_gradients(chunk_size: int | None) -> None:
    hidden, labels, weights, terms = make_inputs(labelled=0.0)
    head = CountingHead()
    sums = loss_sums(hidden, head, labels, weights, terms, chunk_size=chunk_size)
    assert sums.tolist() == [0.0, 0.0]
    loss = LossOutput(sums=sums, counts=torch.zeros(2), terms={"ar": 1.0, "mdm": 1.0})
    loss.total.backward()
    assert loss.total.item() == 0.0
    assert hidden.grad is not None
    assert hidden.grad.eq(0).all()
    assert head.linear.weight.grad is not None, "the loss stays attached to the head's weights"
    assert head.linear.weight.grad.eq(0).all()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    hidden, labels, weights, terms = make_inputs(dtype=torch.bfloat16)
    head = CountingHead(torch.bfloat16)
    sums = loss_sums(hidden, head, labels, weights.float(), terms, chunk_size=4)
    assert sums.dtype == torch.float32
    logits = head(hidden.detach()).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    losses = losses * weights.float().nan_to_num()
    expected = torch.stack([losses[terms == term].sum() for term in range(2)])
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)
