"""Corruption does not depend on torch's default type, which is bf16 while Lightning trains in ``bf16-true``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive, BlockMasked, DualStream, Hybrid, Masked, Objective, SoftTail
from refusion_lit.objectives.batch import CorruptedBatch, ResponseBatch
from refusion_lit.types import SpecialTokens


@pytest.mark.parametrize("ratio", [None, 0.3])
@pytest.mark.parametrize(
    "objective",
    [
        Hybrid(),
        Autoregressive(),
        Masked(),
        Masked(shifted=True, cart_p=0.3),
        BlockMasked(),
        BlockMasked(t_min=0.6),
        DualStream(),
        SoftTail(),
    ],
    ids=repr,
)
def test_bf16_as_default_changes_nothing(
    make_batch: Callable[..., ResponseBatch],
    make_noise: Callable[[ResponseBatch], KeyedNoise],
    special_tokens: SpecialTokens,
    objective: Objective,
    ratio: float | None,
) -> None:
    batch = make_batch([(3, 5 + i % 9) for i in range(301)])  # bf16 has no 301

    def corrupted() -> CorruptedBatch:
        ratios = None if ratio is None else torch.full((301,), ratio, dtype=torch.float64)
        return objective.corrupt(batch, make_noise(batch), special_tokens, mask_ratio=ratios)

    expected = corrupted()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = corrupted()
    finally:
        torch.set_default_dtype(before)
    for field in fields(CorruptedBatch):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other
