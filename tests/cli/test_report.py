"""``refusion-lit report``, and the report that a test ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import QUICKSTART, TINY_TEST
from refusion_lit.cli import main


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Draw the plots."""


@pytest.fixture(scope="module")
def tested(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of ``test``."""
    runs = tmp_path_factory.mktemp("tested")
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={runs}"]
    assert main([*args, "--data.eval_batch_size=5", "--trainer.enable_progress_bar=false"]) == 0
    return runs / "quickstart" / "version_0"


def test_a_test_stores_what_was_run_and_where(tested: Path) -> None:
    results = json.loads((tested / "results.json").read_text())
    assert results["batch_size"] == 5  # the loader hands over no more
    assert results["results"]["refusion"]["num_batches"] == 3  # of 12 examples
    assert results["environment"]["seed"] == 0
    assert {"command", "git", "hardware", "packages"} <= results["environment"].keys()
    assert results["config"]["data"]["eval_batch_size"] == 5


def test_the_shapes_of_calls_add_up_to_the_figures(tested: Path) -> None:
    results = json.loads((tested / "results.json").read_text())
    figures = results["results"]["refusion"]
    # The second number of a line is that of a call's positions, the fourth that of such calls. A call without positions
    # reads the head alone.
    shapes = [tuple(map(int, line.split())) for line in results["call_shapes"]["refusion"]]
    assert sum(shape[3] for shape in shapes if shape[1]) == figures["num_calls"]
    assert sum(shape[1] * shape[3] for shape in shapes) == figures["num_positions"]


def test_a_test_ends_with_a_report_that_can_be_made_again(tested: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (tested / "report" / "report.html").read_bytes()
    assert (tested / "report" / "tradeoff.svg").is_file()
    capsys.readouterr()
    assert main(["report", str(tested), "--format=all"]) == 0
    written = capsys.readouterr().out
    for name in ("report.html", "table.md", "tradeoff.svg"):
        assert name in written
    assert (tested / "report" / "report.html").read_bytes() == page


def test_a_report_projects_to_other_models_and_hardware(tested: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tested), "--project=Qwen3-8B@H100,llada-8b@h200"]) == 0
    written = capsys.readouterr().out
    table = (tested / "report" / "projection.md").read_text()
    assert table in written
    assert "## Qwen3-8B@H100" in table
    assert "## LLaDA-8B@H200" in table


def test_a_report_keeps_other_files(tested: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "table.md"
    notes.write_text("notes")
    assert main(["report", str(tested), "--format=all", f"--output={tmp_path}"]) == 2
    assert "without such files" in capsys.readouterr().err
    for place in (notes, notes / "below"):
        assert main(["report", str(tested), f"--output={place}"]) == 2
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
        ([".", "--num_resamples=10"], "unknown option 'num_resamples'"),
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
