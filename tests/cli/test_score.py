"""``refusion-lit score`` on predictions files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import QUICKSTART, REPOSITORY
from refusion_lit.cli import main
from refusion_lit.evaluation.predictions import read_json_lines
from refusion_lit.reports.rows import read_rows
from refusion_lit.sandbox.runner import LAYERS, Sandbox
from tasks.test_code import HUMANEVAL, runs_code


def _write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def score_args(tmp_path: Path) -> list[str]:
    data = _write_rows(tmp_path / "test.jsonl", [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(4)])
    rows = [
        {"id": f"test:test.jsonl:{i + 1}", "response": f"#### {i % 2}", "score": 0.0, "metrics": {"old": 1.0}, "x": i}
        for i in range(3)
    ]
    return ["score", _write_rows(tmp_path / "p.jsonl", rows), "--task=Gsm8k", f"--task.test={data}"]


def test_scores_are_overwritten_and_the_rest_is_kept(
    score_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (tmp_path / "p.jsonl").read_text()
    assert main(score_args) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {
        "score": pytest.approx(2 / 3), "num_predictions": 3, "num_changed": 2, "num_without_prediction": 1,
        "strict_match": pytest.approx(2 / 3), "flexible_extract": pytest.approx(2 / 3)}  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "p.scored.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [1.0, 1.0, 0.0]
    assert [row["x"] for row in rows] == [0, 1, 2]
    assert all("old" not in row["metrics"] for row in rows), "the task has no such metric, so it was another task's"
    assert (tmp_path / "p.jsonl").read_text() == before


def test_compressed_predictions_are_scored_into_a_file_that_reports_find(score_args: list[str], tmp_path: Path) -> None:
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "p.jsonl").read_bytes()))
    assert main(["score", str(packed), *score_args[2:]]) == 0
    assert (tmp_path / "p.scored.jsonl").is_file()


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "response": "b"}\n', encoding="utf-8-sig")
    assert read_json_lines(path) == [{"id": "a", "response": "b"}]


def test_predictions_for_other_prompts_are_refused_with_both(
    score_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": "test:test.jsonl:1", "prompt": "q0", "response": "#### 0"},
            {"id": "test:test.jsonl:2", "prompt": "another", "response": "#### 1"}]  # fmt: skip
    assert main(["score", _write_rows(tmp_path / "q.jsonl", rows), *score_args[2:]]) == 2
    error = capsys.readouterr().err
    assert "the prompt of 'test:test.jsonl:2' was 'another', is 'q1'" in error
    assert "were made with." in error
    (tmp_path / "config.yaml").touch()  # a run's, whose predictions lie beside it
    assert main(["score", str(tmp_path / "q.jsonl"), *score_args[2:]]) == 2
    assert f"data.task in {tmp_path / 'config.yaml'}" in capsys.readouterr().err
    assert not (tmp_path / "q.scored.jsonl").exists()
    rows[1]["prompt"] = "q1"
    assert main(["score", _write_rows(tmp_path / "q.jsonl", rows), *score_args[2:]]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(score_args) == 0
    assert "p.jsonl has lines without a prompt" in capsys.readouterr().err


def test_only_own_files_are_overwritten(
    score_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.scored.jsonl").write_text("mine")
    assert main(score_args) == 2
    assert "output: expected a new file, or one with predictions of refusion-lit" in capsys.readouterr().err
    assert (tmp_path / "p.scored.jsonl").read_text() == "mine"
    assert main([*score_args, "--overwrite"]) == 0
    assert main(score_args) == 0


def test_a_full_disk_is_named_and_keeps_the_old_scores(
    score_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], small_disk: Callable[[int | None], None]
) -> None:
    assert main(score_args) == 0
    output = tmp_path / "p.scored.jsonl"
    before = output.read_text()
    capsys.readouterr()
    small_disk(100)
    assert main(score_args) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"refusion-lit: error: {output}: File too large"
    assert output.read_text() == before
    small_disk(None)
    assert main(score_args) == 0  # it is still known as its own


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "test:test.jsonl:1", "response": ""}] * 2,
         "predictions: expected different ids, got 'test:test.jsonl:1 2 times in"),
        ([{"id": "nobody", "response": ""}], "1 of 1 ids"),
        ([{"id": "test:test.jsonl:1"}], "wrong.jsonl:1: expected a field 'response'; it has 'id'"),
        ([], "wrong.jsonl'"),
    ],
    ids=["the same id twice", "an unknown id", "no response", "no lines"],
)  # fmt: skip
def test_predictions_that_cannot_be_scored_are_refused(
    rows: list[dict[str, object]],
    message: str,
    score_args: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["score", _write_rows(tmp_path / "wrong.jsonl", rows), *score_args[2:]]) == 2
    assert message in capsys.readouterr().err


def test_wrong_arguments_are_refused(score_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, predictions, *task = score_args
    cases = [
        ([command, str(tmp_path / "no.jsonl"), *task], "no.jsonl: expected a data file"),
        ([command, ".", *task], "predictions: expected a file, got '.'"),
        ([*score_args, f"--output={predictions}"], "output: expected a file other than"),
        (
            [*score_args, f"--output={tmp_path / 'none' / 'p.jsonl'}"],
            "output: expected a file in a directory that exists",
        ),
        # It would be read as a compressed file.
        ([*score_args, f"--output={tmp_path / 'p.jsonl.gz'}"], "output: expected a name without .gz"),
        ([*score_args, "--overwrite=true"], "overwrite: "),
    ]
    for arguments, message in cases:
        assert main(arguments) == 2, message
        assert message in capsys.readouterr().err


def test_code_is_run_only_if_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _write_rows(tmp_path / "h.jsonl", [HUMANEVAL, {**HUMANEVAL, "task_id": "HumanEval/901"}])
    right, wrong = "    return half(half(x))\n", "    return x\n"
    answers = {"900": right, "901": wrong}
    rows = [{"id": f"HumanEval/{name}", "response": text, "score": None} for name, text in answers.items()]
    arguments = ["score", _write_rows(tmp_path / "p.jsonl", rows), "--task=HumanEval", f"--task.files={data}"]
    arguments += ["--num_workers=2"]
    assert main(arguments) == 2
    assert "allow_code_execution: expected true, because scoring runs programs" in capsys.readouterr().err
    assert not (tmp_path / "p.scored.jsonl").exists()
    box = Sandbox(minimum="limits")
    if box.applied != LAYERS:
        pytest.skip(f"this machine offers only {box.describe()}")
    assert main([*arguments, "--allow_code_execution"]) == 0
    captured = capsys.readouterr()
    assert f"isolation of generated code: {box.describe()}" in captured.err
    assert json.loads(captured.out)["score"] == 0.5


def test_weak_isolation_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _write_rows(tmp_path / "h.jsonl", [HUMANEVAL])
    predictions = _write_rows(tmp_path / "p.jsonl", [{"id": "HumanEval/900", "response": "    return x\n"}])
    monkeypatch.setattr("refusion_lit.sandbox.runner._SandboxedProcess.applied_layers", lambda process: ())
    arguments = ["score", predictions, "--task=HumanEval", f"--task.files={data}", "--allow_code_execution"]
    assert main(arguments) == 2
    assert "minimum_isolation: expected at least 'full', got 'limits" in capsys.readouterr().err


@runs_code
def test_from_a_test_over_scoring_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = [{**HUMANEVAL, "prompt": f"12+3{i}", "task_id": f"HumanEval/{i}"} for i in range(2)]
    task = ["HumanEval", f"files={_write_rows(tmp_path / 'h.jsonl', problems)}"]
    model = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
    arguments = ["test", "--config", QUICKSTART, f"--ckpt_path={model}", f"--data.task={task[0]}",
                 f"--data.task.{task[1]}", "--model.sampling.max_new_tokens=16", "--num_threads=1",
                 "--trainer.enable_progress_bar=false", f"--runs_dir={tmp_path}"]  # fmt: skip
    assert main(arguments) == 0
    assert capsys.readouterr().err.count("HumanEval: scores are missing (0 in tables) until `refusion-lit score`") == 1
    run = tmp_path / "quickstart" / "version_0"
    file = run / "predictions_refusion.jsonl"
    predictions = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["score"] for line in predictions] == [None, None]
    predictions[0]["response"] = "def quarter(x):\n    return x / 4"  # the model knows no Python
    _write_rows(file, predictions)
    scored = ["score", str(file), f"--task={task[0]}", f"--task.{task[1]}", "--allow_code_execution"]
    assert main(scored) == 0
    assert json.loads(capsys.readouterr().out)["score"] == 0.5
    (read,), notes = read_rows([run])
    assert [p.score for p in read.predictions.values()] == [1.0, 0.0]
    assert any("predictions_refusion.scored.jsonl" in note for note in notes)
