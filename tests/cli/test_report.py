"""``refusion-lit report``, and the report that a test ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import QUICKSTART, TINY
from refusion_lit.cli import main

TINY_TEST = [option for option in TINY if "trainer." not in option and "backbone" not in option]


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Draw the plots."""


def test_a_test_ends_with_a_report_that_can_be_made_again(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    args += ["--data.eval_batch_size=5", "--trainer.enable_progress_bar=false"]
    assert main(args) == 0
    run = tmp_path / "quickstart" / "version_0"
    results = json.loads((run / "results.json").read_text())
    assert results["batch_size"] == 5  # the loader hands over no more
    assert results["results"]["refusion"]["num_batches"] == 3
    assert results["environment"]["seed"] == 0
    assert {"command", "git", "hardware", "packages"} <= results["environment"].keys()
    assert results["config"]["data"]["eval_batch_size"] == 5
    page = (run / "report" / "report.html").read_bytes()
    assert (run / "report" / "tradeoff.svg").is_file()
    capsys.readouterr()
    assert main(["report", str(run), "--format=all"]) == 0
    written = capsys.readouterr().out
    assert [name for name in ("report.html", "table.md", "tradeoff.svg") if name not in written] == []
    assert (run / "report" / "report.html").read_bytes() == page
    lines = results["call_shapes"]["refusion"]
    counts = [tuple(map(int, line.split())) for line in lines]
    figures = results["results"]["refusion"]
    assert sum(count[3] for count in counts if count[1]) == figures["num_calls"]
    assert sum(count[1] * count[3] for count in counts) == figures["num_positions"]
    assert main(["report", str(run), "--project=Qwen3-8B@H100,llada-8b@h200"]) == 0
    written = capsys.readouterr().out
    table = (run / "report" / "projection.md").read_text()
    assert table in written
    assert "## Qwen3-8B@H100" in table
    assert "## LLaDA-8B@H200" in table
    notes = tmp_path / "table.md"
    notes.write_text("notes")
    assert main(["report", str(run), "--format=all", f"--output={tmp_path}"]) == 2
    assert "without such files" in capsys.readouterr().err
    for place in (notes, notes / "below"):
        assert main(["report", str(run), f"--output={place}"]) == 2
        error = capsys.readouterr().err
        assert "output: expected a directory" in error
        assert str(place) in error
    assert notes.read_text() == "notes"
    assert not list(tmp_path.glob("*.svg"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["missing"], "RUN: expected the directory"),
        ([".", "--format=docx"], "format: expected some of html, markdown"),
        (
            [".", "--num_resamples=10"],
            "unknown option 'num_resamples'",
        ),
        ([".", "--basline=x"], "did you mean 'baseline'"),
        ([], "runs"),
        ([""], "report: expected directories with names, got ''; write . for this one."),
        ([".", "--output="], "report: expected directories with names, got ''"),
    ],
)
def test_errors_are_one_line(
    options: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["report", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert len(error.splitlines()) == 1
