"""Two real processes that share samples in any way give the figures of one process over all of them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

from refusion_lit.decoding import DecodingOutput, Generation
from refusion_lit.learning.batch import LossOutput
from refusion_lit.metrics import DecodingMetrics
from refusion_lit.training.validation import TermMeans

NUM_BATCHES = 7
TERMS = {"ar": 1.0, "mdm": 0.5}
SHARES = {  # which batches each of two processes has
    "even": ([0, 1, 2, 3], [4, 5, 6]),
    "uneven": ([0, 1, 2, 3, 4, 6], [5]),
    "second has none": (list(range(NUM_BATCHES)), []),
    "first has none": ([], list(range(NUM_BATCHES))),
}


def _batch(index: int) -> tuple[DecodingOutput, list[float], LossOutput]:
    """Return a batch of drawn counts; the sums over batches are exact, because all are small multiples of 1/64."""
    draw = random.Random(index)
    rows = [
        Generation(
            id=f"{index}.{i}",
            num_tokens=draw.randint(1, 20),
            finish_reason=draw.choice(["eos", "length", "unfinished"]),
            num_forwards=draw.randint(1, 9),
            num_positions=draw.randint(10, 90),
            seconds=draw.randint(1, 640) / 64,
            round_ratios=[draw.randint(1, 16) / 4 for _ in range(3)],
        )
        for i in range(draw.randint(1, 9))
    ]
    output = DecodingOutput(
        rows=rows, num_calls=draw.randint(5, 20), num_positions=99, seconds=draw.randint(64, 640) / 64
    )
    loss = LossOutput(
        sums=torch.tensor([draw.randint(0, 99) / 8, draw.randint(0, 99) / 8]),
        counts=torch.tensor([float(draw.randint(0, 9)), float(draw.randint(1, 9))]),
        terms=TERMS,
    )
    return output, [draw.randint(0, 4) / 4 for _ in rows], loss


def _figures(batches: list[int]) -> dict[str, Any]:
    decoding, means = DecodingMetrics(), TermMeans(TERMS)
    decoding.restore({})  # as every process does at its start, also one that gets no batch
    means.update(None)
    for output, scores, loss in map(_batch, batches):
        decoding.update(output, scores)
        means.update(loss)
    return {**decoding.compute(), **{name: float(value) for name, value in means.compute().items()}}


def _process(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    figures = {name: _figures(shares[rank]) for name, shares in SHARES.items()}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(figures))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.start_processes(_process, (str(folder),), nprocs=2, start_method="fork")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", SHARES)
def test_every_figure_equals_the_figure_of_one_process(ranks: list[dict[str, dict[str, Any]]], name: str) -> None:
    alone = _figures(list(range(NUM_BATCHES)))
    assert ranks[0][name] == ranks[1][name] == alone
    assert alone["latency_p95"] > alone["latency_median"] > 0


def test_quantiles_are_those_of_the_sorted_latencies(ranks: list[dict[str, dict[str, Any]]]) -> None:
    seconds = sorted(row.seconds for i in range(NUM_BATCHES) for row in _batch(i)[0].rows)
    for name, q in (("latency_median", 0.5), ("latency_p95", 0.95)):
        exact = seconds[math.ceil(q * len(seconds)) - 1]  # the smallest latency with a share of q at or below it
        assert ranks[0]["uneven"][name] == pytest.approx(exact, rel=0.05)  # latencies are counted in bins
