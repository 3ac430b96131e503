"""BGPO's linear bound: tangent to GroupPolicy where the ratio is 1, below it elsewhere, and a sum over samples."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from experiments.policy_estimators.likelihoods import BlockBound, LinearPolicy, MaskedBound, SlotBound
from torch import Tensor

from contrib.rl.test_objective import ADVANTAGES, compute_loss, corrupt_texts, gradient
from refusion_lit.contrib.rl import GroupPolicy, LeftToRight, Likelihood
from refusion_lit.contrib.rl.likelihood import LaidOut
from support.fakes import tiny_backbone

BOUNDS = [MaskedBound(num_samples=3), SlotBound(slot_size=2, num_samples=2), BlockBound(block_size=4, num_samples=3)]


def drift(values: Tensor, corrupted: LaidOut, seed: int, size: float = 1.0) -> Tensor:
    """Return old log-probabilities at random distances from today's."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=values.dtype)
    return (values.detach() + size * noise).where(corrupted.labels >= 0, 0.0)


@pytest.mark.parametrize("likelihood", [*BOUNDS, LeftToRight(slot_size=2)], ids=repr)
def test_the_first_update_has_the_gradient_of_the_group_policy(likelihood: Likelihood) -> None:
    model = tiny_backbone(likelihood.traits)
    results = []
    for objective in (GroupPolicy(likelihood=likelihood, unit="sequence"), LinearPolicy(likelihood=likelihood)):
        corrupted = corrupt_texts(model, objective)
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible).detach().requires_grad_()
        loss = objective.loss(hidden, model.head, corrupted)
        results.append((loss.sums.detach(), *torch.autograd.grad(loss.total, hidden)))
    (expected_sums, expected), (sums, slopes) = results
    torch.testing.assert_close(sums, expected_sums, rtol=0, atol=1e-12)
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-15)
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_it_is_never_above_the_gain_without_clipping(sign: float, num_samples: int) -> None:
    """For each answer on its own; with one sample and a negative advantage they are equal."""
    likelihood = MaskedBound(num_samples=num_samples)
    model = tiny_backbone(likelihood.traits)
    unclipped = GroupPolicy(likelihood=likelihood, unit="sequence", clip_low=1.0, clip_high=1e9)
    for seed in range(20):
        corrupted = corrupt_texts(model, unclipped)
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible).detach()
        values = unclipped.log_probabilities(hidden, model.head, corrupted)[0]
        corrupted = replace(corrupted, old=drift(values, corrupted, seed, 0.1 + seed % 4))
        for number in range(len(ADVANTAGES)):
            alone = torch.zeros_like(ADVANTAGES)
            alone[number] = sign * ADVANTAGES[number].abs()
            bound, gain = (
                -float(objective.loss(hidden, model.head, replace(corrupted, advantages=alone)).sums.detach()[0])
                for objective in (LinearPolicy(likelihood=likelihood), unclipped)
            )
            is_equal = bound == pytest.approx(gain, rel=1e-12)
            assert is_equal == (num_samples == 1 and sign < 0)
            assert is_equal or bound < gain


def select_sample(corrupted: LaidOut, num_samples: int, number: int) -> LaidOut:
    """Return the rows of one sample: one view of each answer, or two that are coupled."""
    rows = torch.arange(len(corrupted.labels)).view(-1, num_samples, len(ADVANTAGES))[:, number].flatten()
    per_row = {
        field.name: value[rows]
        for field in fields(corrupted)
        if isinstance(value := getattr(corrupted, field.name), Tensor) and len(value) == len(corrupted.labels)
    }
    return replace(corrupted, **per_row, num_views=corrupted.num_views // num_samples)


@pytest.mark.parametrize("likelihood", BOUNDS, ids=repr)
def test_gradients_of_single_samples_add_up(likelihood: Any) -> None:
    """LinearPolicy may run its samples one by one, to save memory; GroupPolicy's ratio needs all samples at once."""
    model = tiny_backbone(likelihood.traits)
    for objective in (LinearPolicy(likelihood=likelihood), GroupPolicy(likelihood=likelihood, unit="sequence")):
        corrupted = corrupt_texts(model, objective)
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        values = objective.log_probabilities(hidden, model.head, corrupted)[0]
        corrupted = replace(corrupted, old=drift(values, corrupted, 0))
        whole = compute_loss(model, objective, corrupted)
        expected = gradient(model, whole.total)
        value, total = 0.0, torch.zeros_like(expected)
        for number in range(likelihood.num_samples):
            part = compute_loss(model, objective, select_sample(corrupted, likelihood.num_samples, number))
            value += float(part.sums.detach()[0])
            total += gradient(model, part.total)
        same_value = value == pytest.approx(float(whole.sums.detach()[0]), abs=1e-6)
        same_gradient = torch.allclose(total, expected, rtol=1e-5, atol=1e-6)
        if isinstance(objective, LinearPolicy):
            assert same_value
            assert same_gradient
        else:
            assert not same_value
            assert not same_gradient
        assert float(expected.abs().max()) > 1e-2


@pytest.mark.parametrize(("option", "value"), [("unit", "token"), ("kl_weight", 0.1)])
def test_options_that_the_bound_does_not_have_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^objective\.{option}: expected .* got {value!r}"):
        LinearPolicy(likelihood=LeftToRight(), **{option: value})
