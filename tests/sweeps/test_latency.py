"""A sweep measures the speed of its decoders after its points have run, and summarizes the speeds in a sentence."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from refusion_lit.cli import main
from refusion_lit.evaluation.latency import Entrant, Timings, measure_latency
from refusion_lit.sweeps.latency import summary_sentence
from support.forks import start, wait

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"


OPTIONS = {"ckpt_path": str(MODEL), "data.task.num_test": 6, "model.sampling.max_new_tokens": 16}


def sweep_file(folder: Path, **options: object) -> str:
    values = {
        "base": [str(ROOT / "configs" / "quickstart.yaml")],
        "description": "Two decoders of one model.",
        "options": {**OPTIONS, "num_threads": 1},
        "grid": {"model.decoders": [{"slots": "ReFusion"}, {"other": {"class_path": "ReFusion",
                                                                      "init_args": {"slot_size": 4}}}]},
        "latency": {"num_prompts": 3, "batch_sizes": [1, 2], "min_batches": 2},
        **options,
    }  # fmt: skip
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


@pytest.fixture
def timed_threads(monkeypatch: pytest.MonkeyPatch) -> dict[int, int | None]:
    """Record the threads per slot size with which a sweep measures speeds; measure with this process's threads."""
    threads = {}

    def record(entrants: dict[str, Entrant], *args: Any, **options: Any) -> dict[int, dict[str, Timings]]:
        threads.update({entrant.decoder.slot_size: entrant.num_threads for entrant in entrants.values()})
        unthreaded = {name: replace(entrant, num_threads=None) for name, entrant in entrants.items()}
        return measure_latency(unthreaded, *args, **options)

    monkeypatch.setattr("refusion_lit.sweeps.latency.measure_latency", record)
    return threads


def test_every_point_is_timed_with_the_threads_of_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed_threads: dict[int, int | None]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    points = [{"model.decoders.refusion.slot_size": 8, "num_threads": 1},
              {"model.decoders.refusion.slot_size": 4, "num_threads": 2}]  # fmt: skip
    file = sweep_file(tmp_path, grid={}, entries=points, options=OPTIONS)
    assert main(["sweep", "--config", file, "--directory", str(tmp_path / "sweep")]) == 0
    assert timed_threads == {8: 1, 4: 2}


def test_omp_num_threads_applies_to_points_and_so_to_their_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = sweep_file(tmp_path, grid={}, options={**OPTIONS, "num_threads": 2})
    # In a process of its own, because torch reads the variable when it is imported.
    process = start(["sweep", "--config", file, "--directory", str(tmp_path / "sweep")], tmp_path / "log")
    assert wait(process) == 0, (tmp_path / "log").read_text()
    [results] = tmp_path.glob("sweep/points/*/test/results.json")
    assert json.loads(results.read_text())["environment"]["hardware"]["num_threads"] == 1


def test_omp_num_threads_is_refused_where_points_differ_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = sweep_file(tmp_path, grid={"num_threads": [1, 2]}, options=OPTIONS)
    assert main(["sweep", "--config", file, "--directory", str(tmp_path / "sweep")]) == 2
    assert "num_threads: expected no OMP_NUM_THREADS" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_decoders_of_all_points_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "sweep"
    arguments = ["sweep", "--config", sweep_file(tmp_path), "--directory", str(directory)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("Two decoders of one model.")
    assert "times, alone" in printed.out
    results = {path: path.read_bytes() for path in directory.glob("points/*/test/results.json")}
    latencies = [json.loads(text)["latency_results"] for text in results.values()]
    assert len(latencies) == 2
    assert len({latency["baseline"] for latency in latencies}) == 1
    for latency in latencies:
        (figures,) = latency["decoders"].values()
        assert [len(figures[size]["seconds"]) for size in ("1", "2")] == [3, 2]
    (first,) = (latency["decoders"]["slots"] for latency in latencies if "slots" in latency["decoders"])
    assert first["1"]["times_baseline"] == [1.0, 1.0, 1.0], (
        "the first decoder is the baseline where none is Autoregressive"
    )
    with (directory / "results.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert all(json.loads(row["latency"])["1"]["tokens_per_second"] > 0 for row in rows)
    page = (directory / "report" / "report.html").read_text(encoding="utf-8")
    assert "one prompt at a time" in page
    assert main([*arguments, "--resume"]) == 0  # nothing has changed, so nothing is measured again
    assert {path: path.read_bytes() for path in results} == results


def test_a_wrong_option_is_refused_before_points_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", "--config", sweep_file(tmp_path, latency={"prompts": 3}), "--directory", str(tmp_path / "s")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "latency" in error
    assert "'prompts'" in error
    assert "'num_prompts'" in error
    assert not list(tmp_path.glob("s/points/*"))


def test_the_sentence_names_the_fastest_decoder_with_a_good_score() -> None:
    def row(name: str, score: float, times: list[float]) -> dict[str, object]:
        return {"class": name, "score": score, "latency": {"1": {"times_baseline": times}}}

    baseline = row("Autoregressive", 0.99, [1.0, 1.0, 1.0])
    rows = [
        row("LLaDA", 0.99, [0.3, 0.2, 0.4]),
        row("ReFusion", 0.98, [4.7, 4.5, 4.9]),
        row("Fast", 0.5, [9.0, 8.0, 9.5]),
    ]
    sentence = summary_sentence([baseline, *rows])
    assert sentence is not None
    assert "ReFusion" in sentence
    assert "4.7 times" in sentence
    assert "Fast" not in sentence
    assert summary_sentence(rows) is None
    slower = str(summary_sentence([baseline, rows[2]]))
    assert "No decoder" in slower
    assert str(rows[2]["score"]) in slower
