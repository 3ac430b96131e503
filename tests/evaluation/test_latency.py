"""Speeds are measured in turns on the same batches, and ratios have intervals over batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import Autoregressive, DecodingOutput, ReFusion
from refusion_lit.evaluation import latency
from refusion_lit.evaluation.latency import Entrant, Timings, measure_latency
from refusion_lit.text_model import TextModel
from refusion_lit.types import LatencyOptions, Prompt, SamplingParams

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"


def test_every_entrant_decodes_every_batch_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = refusion_lit.load(MODEL)
    prompts = [Prompt(token_ids=tuple(model.encode(f"1{n}+34,56+78>")), id=str(n)) for n in range(5)]
    sampling = SamplingParams(max_new_tokens=24)
    decoders = {"refusion": ReFusion(), "left to right": ReFusion(num_serial_blocks=1)}
    entrants = {
        name: Entrant(model=model, decoder=decoder, sampling=sampling, prompts=prompts)
        for name, decoder in decoders.items()
    }
    turns: list[tuple[str, tuple[int, ...]]] = []
    timed = latency._time_batch

    def record_turn(entrant: Entrant, indices: list[int]) -> object:
        name = next(name for name, decoder in decoders.items() if entrant.decoder is decoder)
        turns.append((name, tuple(indices)))
        return timed(entrant, indices)

    monkeypatch.setattr(latency, "_time_batch", record_turn)
    steps: list[tuple[int, int]] = []
    options = LatencyOptions(num_prompts=4, batch_sizes=(1, 2), min_batches=3)
    actual = measure_latency(entrants, options, progress=lambda *counts: steps.append(counts))
    assert steps == [(number, len(turns)) for number in range(1, len(turns) + 1)]
    for start in range(0, len(turns), 2):  # both decode a batch before the next batch begins
        (first, batch), (second, again) = turns[start : start + 2]
        assert {first, second} == decoders.keys()
        assert batch == again
    assert {name for name, _ in turns[::2]} == decoders.keys(), "each goes first in some turns"
    assert actual.keys() == {1, 2}
    for size, num_batches in ((1, 4), (2, 3)):  # all four prompts, and at least three batches
        assert actual[size].keys() == decoders.keys()
        assert all(len(timings.seconds) == num_batches for timings in actual[size].values())
    reference = model.decode(prompts, decoders["refusion"], sampling)
    sizes = {row.num_tokens for row in reference.rows}
    assert set(actual[1]["refusion"].num_tokens) <= sizes
    assert all(seconds > 0 for speeds in actual.values() for timings in speeds.values() for seconds in timings.seconds)


def test_every_entrant_is_timed_with_its_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = refusion_lit.load(MODEL)
    prompts = [Prompt(token_ids=tuple(model.encode("12+34,56+78>")), id="0")]
    sampling = SamplingParams(max_new_tokens=4)
    entrants = {
        name: Entrant(model=model, decoder=ReFusion(), sampling=sampling, prompts=prompts, num_threads=num_threads)
        for name, num_threads in {"two": 2, "three": 3, "default": None}.items()
    }
    nums_threads = []

    def record_threads(self: TextModel, *args: object, **options: object) -> DecodingOutput:
        nums_threads.append(torch.get_num_threads())
        return DecodingOutput()

    monkeypatch.setattr(TextModel, "decode", record_threads)
    measure_latency(entrants, LatencyOptions(num_prompts=1, batch_sizes=(1,), min_batches=2))
    assert sorted(nums_threads) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert torch.get_num_threads() == 1


def test_a_ratio_of_speeds_is_paired_by_batch() -> None:
    slow = Timings(num_tokens=[10, 20, 30], seconds=[1.0, 2.0, 3.0])
    fast = Timings(num_tokens=[10, 20, 30], seconds=[0.5, 1.0, 1.5])
    interval = fast.over(slow)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2, 2, 2))
    noisy = Timings(num_tokens=[10, 20, 30], seconds=[0.5, 2.0, 0.75])
    interval = noisy.over(slow)
    assert interval.low < interval.estimate < interval.high
    assert interval.low >= 1
    assert interval.high <= 4


@pytest.mark.parametrize("sizes", [(), (0,), ("1",)])
def test_wrong_batch_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="batch_sizes"):
        LatencyOptions(batch_sizes=sizes)


def test_entrants_need_the_same_prompts() -> None:
    model = refusion_lit.load(MODEL)
    prompt = Prompt(token_ids=(4, 5), id="0")
    sampling = SamplingParams(max_new_tokens=2)
    entrants = {
        str(number): Entrant(model=model, decoder=Autoregressive(), sampling=sampling, prompts=[prompt] * number)
        for number in (1, 2)
    }
    with pytest.raises(ValueError, match="entrants"):
        measure_latency(entrants, LatencyOptions())


def test_a_test_measures_its_decoders_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(MODEL.parents[3] / "configs" / "quickstart.yaml")
    options = ["--model.decoding.latency.num_prompts=2", "--model.decoding.latency.batch_sizes=[1]"]
    options += ["--data.task.num_test=4", "--model.sampling.max_new_tokens=16", "--num_threads=1"]
    options += ["--model.decoders.tokens.class_path=ReFusion", "--model.decoders.tokens.init_args.slot_size=1"]
    arguments = ["test", "--config", config, "--ckpt_path", str(MODEL), f"--runs_dir={tmp_path}", "--run_version=t"]
    assert main([*arguments, *options]) == 0
    assert "times, alone" in capsys.readouterr().out
    results = json.loads((tmp_path / "quickstart" / "t" / "results.json").read_text())
    latency = results["latency_results"]
    assert latency["baseline"] == "refusion"
    assert latency["decoders"].keys() == {"refusion", "tokens"}
    assert len(latency["decoders"]["tokens"]["1"]["seconds"]) == 6  # min_batches
