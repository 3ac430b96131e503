"""A sweep measures all its decoders in turns after its points have run, and says what it found."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

from refusion_lit.cli import main
from refusion_lit.decoding import ReFusion
from refusion_lit.sweeps.latency import summary_sentence

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"


def sweep_file(folder: Path, **options: object) -> str:
    values = {
        "base": [str(ROOT / "configs" / "quickstart.yaml")],
        "description": "Two decoders of one model.",
        "options": {"ckpt_path": str(MODEL), "data.task.num_test": 6, "model.sampling.max_new_tokens": 16,
                    "num_threads": 1, "model.decoding.allow_mismatch": True},
        "grid": {"model.decoders": [{"slots": "ReFusion"}, {"other": {"class_path": "ReFusion",
                                                                      "init_args": {"slot_size": 4}}}]},
        "latency": {"num_prompts": 3, "batch_sizes": [1, 2], "min_batches": 2},
        **options,
    }  # fmt: skip
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def test_speeds_are_measured_with_the_threads_of_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = ReFusion.step

    def counting(self: ReFusion, *args: object) -> object:
        seen.append(torch.get_num_threads())
        return step(self, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(ReFusion, "step", counting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arguments = ["sweep", "--config", sweep_file(tmp_path), "--directory", str(tmp_path / "sweep")]
        assert main(arguments) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


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
    assert "latency: expected" in capsys.readouterr().err
    assert not list(tmp_path.glob("s/points/*"))


def test_the_sentence_names_the_fastest_of_the_good() -> None:
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
    assert "No decoder" in str(summary_sentence([baseline, rows[2]]))
