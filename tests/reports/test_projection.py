"""Projections of counted calls: against calculations by hand, and as the command prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refusion_lit.cli import main
from refusion_lit.engine.output import CallShapes
from refusion_lit.reports.projection import (
    DEVICES,
    LAUNCHES_PER_HEAD,
    LAUNCHES_PER_LAYER,
    MODELS,
    Device,
    ModelSize,
    project,
)
from reports.samples import predictions, write_run

# Body: 2 layers of 10 * 4 * 2 * (3 + 1) + 3 * 10 * 20 = 920 weights. Head: 10 * 50 = 500 weights.
# Cache: 2 * 2 * 1 * 4 = 16 values per token. Attention: 4 * 2 * 3 * 4 = 96 operations per position and key.
TINY = ModelSize(
    num_layers=2, hidden_size=10, intermediate_size=20, num_heads=3, num_kv_heads=1, head_dim=4, vocab_size=50,
    source="a test",
)  # fmt: skip
# 100 values of 2 bytes per second, 1600 operations per second: more than 8 positions are limited by operations.
SLOW = Device(bytes_per_second=200.0, operations_per_second=1600.0, launch_seconds=0.5, source="a test")


def shapes(calls: Sequence[tuple[int, int, int, int]]) -> CallShapes:
    counted = CallShapes()
    for num_sequences, num_positions, num_logits, cache_length in calls:
        counted.add(
            num_sequences=num_sequences, num_positions=num_positions, num_logits=num_logits, cache_length=cache_length
        )
    return counted


@pytest.mark.parametrize(
    ("calls", "body", "attention", "head", "num_calls"),
    [
        # One token: weights are read, 1840 / 100; the cache is read, 16 * 10 / 100, for 96 * 10 operations.
        ([(1, 1, 1, 10)], 18.4, 1.6, 5.0, 1),
        # The same twice, with another cache length.
        ([(1, 1, 1, 10), (1, 1, 1, 30)], 36.8, 6.4, 10.0, 2),
        # Sixteen positions of one sequence: 2 * 1840 * 16 / 1600, 16 * 10 * 96 / 1600; one logit.
        ([(1, 16, 1, 10)], 36.8, 9.6, 5.0, 1),
        # Sixteen positions of sixteen sequences: the cache of all is read, 16 * 16 * 10 / 100.
        ([(16, 16, 16, 10)], 36.8, 25.6, 10.0, 1),
        # A prefill without logits.
        ([(1, 2, 0, 2)], 18.4, 0.32, 0.0, 1),
    ],
)
def test_seconds_are_those_of_a_calculation_by_hand(
    calls: list[tuple[int, int, int, int]], body: float, attention: float, head: float, num_calls: int
) -> None:
    seconds = project(shapes(calls), TINY, SLOW)
    assert TINY.num_body_weights == 1840
    assert (seconds.body, seconds.attention, seconds.head) == pytest.approx((body, attention, head))
    launches = 0.5 * num_calls * (2 * LAUNCHES_PER_LAYER + LAUNCHES_PER_HEAD * bool(head))
    assert seconds.launches == pytest.approx(launches)
    assert seconds.seconds == pytest.approx(body + attention + head + launches)


def test_without_overlap_times_add_up() -> None:
    seconds = project(shapes([(1, 16, 1, 10)]), TINY, replace(SLOW, overlaps=False))
    assert (seconds.body, seconds.attention) == pytest.approx((36.8 + 18.4, 9.6 + 1.6))
    assert seconds.head == pytest.approx(5.0 + 2 * 500 / 1600)


def test_further_drafts_cost_the_head_alone() -> None:
    seconds = project(shapes([(1, 0, 3, 0)]), TINY, SLOW)
    assert (seconds.body, seconds.attention, seconds.head) == (0.0, 0.0, 5.0)
    assert seconds.launches == 0.5 * LAUNCHES_PER_HEAD


def test_shapes_are_read_and_merged() -> None:
    first, second = shapes([(2, 4, 2, 10), (1, 1, 1, 3)]), shapes([(2, 4, 2, 12)])
    first.merge(CallShapes.from_lines(second.lines()))
    assert first.lines() == ["1 1 1 1 3", "2 4 2 2 22"]
    assert first.counts == shapes([(2, 4, 2, 10), (1, 1, 1, 3), (2, 4, 2, 12)]).counts


def test_sizes_are_those_of_the_published_models() -> None:
    billions = {name: (size.num_body_weights + size.num_head_weights) / 1e9 for name, size in MODELS.items()}
    assert billions["Qwen3-8B"] == pytest.approx(8.2 - 0.62, abs=0.05)  # the embedding apart
    assert billions["Qwen3-0.6B"] == pytest.approx(0.6, abs=0.01)
    assert billions["LLaDA-8B"] == pytest.approx(8.0 - 0.52, abs=0.05)
    assert billions["SmolLM2-135M"] == pytest.approx(0.135, abs=0.001)


def run_with(folder: Path, **fields: Any) -> Path:
    run = write_run(folder, {name: predictions([1.0] * 2, tokens=50) for name in ("one", "four")})
    path = run / "results.json"
    content = json.loads(path.read_text())
    content["decoders"]["one"] = {"class": "Autoregressive"}
    for figures in content["results"].values():
        figures["num_tokens"] = 100
    path.write_text(json.dumps(content | fields))
    return run


def test_a_table_compares_with_autoregressive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counted = {"four": ["1 4 4 25 2500"], "one": ["1 1 1 100 5000"]}
    run = run_with(tmp_path / "run", call_shapes=counted)
    assert main(["report", str(run), "--project=qwen3-8b@a100"]) == 0
    out = capsys.readouterr().out
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in out.splitlines() if "|" in line}
    seconds = {
        name: project(CallShapes.from_lines(lines), MODELS["Qwen3-8B"], DEVICES["A100"]).seconds
        for name, lines in counted.items()
    }
    one, four = (next(cells for name, cells in rows.items() if name.startswith(start)) for start in ("one", "four"))
    assert one[2:5] == ["1.00", "1.0", f"{100 / seconds['one']:.0f}"]
    assert four[2:5] == ["4.00", "1.0", f"{100 / seconds['four']:.0f}"]
    assert (one[-1], four[-1]) == ("1.00", f"{seconds['one'] / seconds['four']:.2f}")
    assert f"{seconds['one'] / seconds['four']:.1f}" == "4.0"  # four positions cost what one costs
    assert main(["report", str(run), "--project=qwen3-8b@a100", "--baseline=four"]) == 0
    assert f"| {seconds['four'] / seconds['one']:.2f} |" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["Qwen9@H100", "Qwen3-8B@TPU", "Qwen3-8B", "@", "Qwen3-8B@H100,"])
def test_unknown_names_are_refused_with_the_known_ones(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "run", call_shapes={"one": ["1 1 1 1 1"]})
    assert main(["report", str(run), f"--project={target}"]) == 2
    error = capsys.readouterr().err
    assert "project" in error
    assert [name for name in (*MODELS, *DEVICES) if name not in error] == []
    assert not (run / "report").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["project", "refusion-lit test"]),
        ({"call_shapes": {"one": ["1 2"]}}, ["call_shapes", "five whole numbers"]),
        ({"call_shapes": {"one": 3}}, ["call_shapes"]),
        ({"call_shapes": ["1 1 1 1 1"]}, ["call_shapes", "a mapping"]),
    ],
)
def test_runs_without_counts_are_refused(
    fields: dict[str, Any], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "run", **fields)
    assert main(["report", str(run), "--project=Qwen3-8B@H100"]) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
