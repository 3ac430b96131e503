"""The fixed cost of a forward, from clocks that are told what to say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import tiny_backbone
from refusion_lit.decoding import Decoder, ReFusion, decode
from refusion_lit.modeling import backbone, forward_cost
from refusion_lit.modeling.forward_cost import MAX_COST, measure_forward_cost
from refusion_lit.types import ForwardCost, ModelTraits, Prompt, SamplingParams


def measured(seconds: dict[str, float], num_rows: int, monkeypatch: pytest.MonkeyPatch) -> ForwardCost:
    """Measure a model whose forward takes a + b * positions seconds."""
    now = 0.0

    def forward(length: int) -> None:
        nonlocal now
        now += seconds["fixed"] + seconds["position"] * length

    with monkeypatch.context() as patch:
        patch.setattr(forward_cost.time, "perf_counter", lambda: now)
        return measure_forward_cost(forward, num_rows)


@given(fixed=st.floats(0, 1), position=st.floats(1e-3, 1), num_rows=st.sampled_from([1, 4, 64, 1000]))
def test_the_ratio_of_both_costs_is_found(fixed: float, position: float, num_rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = measured({"fixed": fixed, "position": position}, num_rows, patch)
    assert found.fixed == pytest.approx(min(fixed / position, MAX_COST), abs=1e-6)
    if fixed / position < MAX_COST:
        assert found.of(90) == pytest.approx(found.fixed + 90, rel=1e-6)
        assert found.of(3) == pytest.approx(found.fixed + max(3, found.measured[0][0]), rel=1e-6)


def test_costs_are_interpolated_and_extrapolated_linearly() -> None:
    cost = ForwardCost(7.0, ((2, 10.0), (6, 8.0), (12, 20.0)))
    assert [cost.of(n) for n in (1, 2, 4, 6, 9, 12, 15)] == [10.0, 10.0, 9.0, 8.0, 14.0, 20.0, 23.0]
    assert ForwardCost(7.0).of(5) == 12.0


def test_a_device_that_takes_no_longer_for_more_positions_gets_the_highest_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured({"fixed": 1.0, "position": 0.0}, 1, monkeypatch).fixed == MAX_COST


@pytest.mark.parametrize(
    ("max_positions", "expected"), [(1, set()), (2, {1, 2}), (20, {1, 3, 5, 10, 20}), (99, {2, 6, 12, 24, 48})]
)
def test_no_forward_is_longer_than_the_positions_that_a_model_has_learnt(
    max_positions: int, expected: set[int]
) -> None:
    lengths: set[int] = set()
    measure_forward_cost(lengths.add, 1, max_positions)
    assert lengths == expected


@pytest.mark.measured_cost
def test_a_backbone_is_measured_once_for_a_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_backbone(ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot")))
    model._forward_costs.clear()
    prompts = [Prompt(token_ids=(5, 6, 7 + i), id=str(i)) for i in range(3)]
    sampling = SamplingParams(max_new_tokens=16)
    texts = {}
    for cost in ("measure", 0, 10_000):
        decoder: Decoder = ReFusion(slot_size=4, forward_cost=cost)  # type: ignore[arg-type]
        texts[cost] = [row.token_ids for row in decode(model, decoder, prompts, sampling, max_batch_size=4).rows]
    assert texts["measure"] == texts[0] == texts[10_000]
    assert len(model.forward_costs) == 1
    assert 0 <= next(iter(model.forward_costs.values())) <= MAX_COST

    monkeypatch.setattr(backbone, "measure_forward_cost", lambda *_: pytest.fail("measured again"))
    decode(model, ReFusion(slot_size=4), prompts[:3], sampling, max_batch_size=3)


@pytest.mark.measured_cost
def test_a_drafter_is_not_measured_under_autocast() -> None:
    model = tiny_backbone()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"^drafter: expected .* autocast"):
        model.forward_cost(1)
