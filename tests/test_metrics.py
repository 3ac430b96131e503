"""The metrics contract: ratios of totals, counted by hand here."""

from __future__ import annotations

import json

import pytest
import torch

from refusion_lit.decoding import DecodingOutput, Generation
from refusion_lit.learning.batch import LossOutput
from refusion_lit.metrics import DecodingMetrics
from refusion_lit.training.validation import TermMeans

TERMS = {"ar": 1.0, "mdm": 0.5}


def _row(num_tokens: int, num_forwards: int, seconds: float = 0.5, reason: str = "eos") -> Generation:
    return Generation(
        id="x",
        token_ids=[3] * num_tokens,
        num_tokens=num_tokens,
        finish_reason=reason,
        num_forwards=num_forwards,
        num_positions=10 * num_forwards,
        seconds=seconds,
        round_ratios=[4.0, 1.0],
    )


def _output(rows: list[Generation], seconds: float, num_calls: int = 5) -> DecodingOutput:
    return DecodingOutput(rows=rows, num_calls=num_calls, num_positions=99, seconds=seconds)


def test_figures_are_ratios_of_totals() -> None:
    metrics = DecodingMetrics()
    metrics.update(_output([_row(10, 2), _row(1, 9, reason="unfinished")], seconds=3.0), [1.0, 0.0])
    metrics.update(_output([_row(30, 3)], seconds=2.0), [0.5])
    figures = metrics.compute()
    assert figures["score"] == pytest.approx(1.5 / 3)
    assert figures["tokens_per_forward"] == pytest.approx(41 / 14)
    assert figures["tokens_per_second"] == pytest.approx(41 / 5)
    assert figures["tokens_per_call"] == pytest.approx(41 / 10)
    assert figures["positions_per_token"] == pytest.approx(140 / 41)
    assert figures["paper_tokens_per_forward"] == pytest.approx(2.5)
    assert (figures["num_prompts"], figures["num_unfinished"], figures["num_calls"]) == (3, 1, 10)
    assert (figures["calls_per_batch"], figures["num_batches"]) == (5, 2)


def test_batching_changes_nothing_that_is_counted_by_prompt() -> None:
    rows = [_row(n, f) for n, f in ((5, 1), (7, 2), (9, 4))]
    together, alone = DecodingMetrics(), DecodingMetrics()
    together.update(_output(rows, seconds=1.0), [1.0, 0.0, 1.0])
    for row, score in zip(rows, (1.0, 0.0, 1.0), strict=True):
        alone.update(_output([row], seconds=1.0), [score])
    figures, expected = together.compute(), alone.compute()
    for key in ("score", "tokens_per_forward", "positions_per_token", "num_forwards", "paper_tokens_per_forward"):
        assert figures[key] == pytest.approx(expected[key])


def test_latency_quantiles_are_within_a_bin() -> None:
    metrics = DecodingMetrics()
    seconds = [0.01 * i for i in range(1, 101)]
    metrics.update(_output([_row(1, 1, s) for s in seconds], seconds=1.0), [1.0] * 100)
    figures = metrics.compute()
    assert figures["latency_median"] == pytest.approx(0.50, rel=0.05)
    assert figures["latency_p95"] == pytest.approx(0.95, rel=0.05)


def test_a_snapshot_continues_where_it_was_taken() -> None:
    outputs = [_output([_row(tokens, 2, seconds)], seconds) for tokens, seconds in ((1, 90.0), (30, 2.0), (1, 70.0))]
    metrics = DecodingMetrics()
    resumed = DecodingMetrics()
    for output in outputs[:2]:
        metrics.update(output, [1.0])
    resumed.restore(json.loads(json.dumps(metrics.snapshot())))
    metrics.update(outputs[2], [0.5])
    resumed.update(outputs[2], [0.5])
    assert resumed.compute() == metrics.compute()
    assert resumed.compute()["tokens_per_second"] == pytest.approx(32 / 162)


def test_nothing_counted_gives_zeros() -> None:
    metrics = DecodingMetrics()
    metrics.update(_output([], seconds=0.0, num_calls=0), [])
    assert set(metrics.compute().values()) == {0}


def test_term_means_are_totals_over_totals() -> None:
    means = TermMeans(TERMS)
    for sums, counts in (((2.0, 1.0), (4.0, 2.0)), ((10.0, 3.0), (1.0, 2.0))):
        loss = LossOutput(sums=torch.tensor(sums), counts=torch.tensor(counts), terms=TERMS)
        means.update(loss)
    values = {name: float(value) for name, value in means.compute().items()}
    assert values == pytest.approx({"ar": 12 / 5, "mdm": 1.0, "total": 12 / 5 + 0.5})
