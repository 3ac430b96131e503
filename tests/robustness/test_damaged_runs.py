"""Runs with a truncated checkpoint, damaged files or directories that cannot be written: a line before work starts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cli.conftest import QUICKSTART, TINY
from refusion_lit.cli import main
from support.forks import drop_root_rights, start, wait

Damage = Callable[[Path], object]


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


TRUNCATED: dict[str, Damage] = {"half": _halve, "empty": lambda path: path.write_bytes(b"")}
DAMAGES: dict[str, Damage] = {
    **TRUNCATED,
    "zeros": lambda path: path.write_bytes(bytes(200)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{"),
    "a list": lambda path: path.write_text("[1]"),
    "deep": lambda path: path.write_text("[\n" * 100_000),  # in a line, PyYAML would look for a key for seconds
    "a directory": _replace_by_directory,
}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with checkpoints of steps 2 and 4, and a last checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("training")
    overlay = folder / "often.yaml"
    saver = "class_path: lightning.pytorch.callbacks.ModelCheckpoint"
    options = "init_args: {save_last: true, save_top_k: -1, every_n_train_steps: 2}"
    overlay.write_text(f"trainer: {{callbacks: [{{{saver}, {options}}}]}}")
    args = ["fit", "--config", QUICKSTART, "--config", str(overlay), *TINY, "--trainer.max_steps=5"]
    args += ["--model.schedule.warmup_steps=2", "--model.schedule.final_lr_ratio=1"]
    assert main([*args, f"--runs_dir={folder / 'runs'}", "--run_version=v"]) == 0
    return folder / "runs" / "quickstart" / "v"


@pytest.fixture
def run(training: Path, tmp_path: Path) -> Path:
    """Return a copy of the training to damage."""
    return Path(shutil.copytree(training, tmp_path / "runs" / "quickstart" / "v"))


@pytest.fixture(scope="module")
def finished_test(training: Path) -> Path:
    place = [f"--runs_dir={training.parents[1]}", "--run_version=t"]
    assert main(["test", f"--config={training / 'config.yaml'}", f"--ckpt_path={training}", *place]) == 0
    return training.with_name("t")


def _read_error(args: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail with a line; return the line."""
    capfd.readouterr()
    assert main(args) == 2
    output = capfd.readouterr().err
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("refusion-lit: error:")]
    return line


def _checkpoint_of_step_4(run: Path) -> Path:
    """Return the path of the checkpoint of step 4."""
    return run / "checkpoints" / "epoch=0-step=4.ckpt"


@pytest.mark.parametrize("damage", TRUNCATED)
def test_a_training_with_a_truncated_last_checkpoint_resumes_from_the_newest_whole_one_and_says_so(
    training: Path, run: Path, damage: str
) -> None:
    last = run / "checkpoints" / "last.ckpt"
    TRUNCATED[damage](last)
    with pytest.warns(UserWarning, match=rf"last\.ckpt: damaged.* from {_checkpoint_of_step_4(run)}"):
        assert main(["fit", f"--resume={run}"]) == 0
    resumed, unbroken = (torch.load(path, weights_only=True) for path in (last, training / "checkpoints" / "last.ckpt"))
    assert resumed["global_step"] == 5
    for name, weight in unbroken["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], weight)


def test_a_truncated_last_checkpoint_is_refused_elsewhere_and_the_newest_whole_one_named(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    last = run / "checkpoints" / "last.ckpt"
    _halve(last)
    generate = ["generate", "--prompt=12+34>", "--max_new_tokens=8"]
    test = ["test", f"--config={run / 'config.yaml'}", "--run_version=t"]
    for command in (generate, test, ["export", f"--output={tmp_path / 'exported'}"], ["validate", *test[1:]]):
        for source in (run, last):
            line = _read_error([*command, f"--ckpt_path={source}"], capfd)
            assert f"{last} cannot be read as a checkpoint" in line
            assert str(_checkpoint_of_step_4(run)) in line
    assert main([*generate, f"--ckpt_path={_checkpoint_of_step_4(run)}"]) == 0


def test_a_training_without_a_whole_checkpoint_does_not_start_again_by_itself(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (run / "checkpoints").iterdir():
        _halve(path)
    line = _read_error(["fit", f"--resume={run}"], capfd)
    assert "resume: expected a whole checkpoint" in line
    assert str(run) in line


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_results_are_named_by_a_report_and_written_again_by_a_resumed_test(
    finished_test: Path, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished_test, tmp_path / "runs" / "whole" / "t")
    run = Path(shutil.copytree(finished_test, tmp_path / "runs" / "damaged" / "t"))
    path = run / "results.json"
    before = json.loads(path.read_text())["results"]
    DAMAGES[damage](path)
    assert str(path) in _read_error(["report", str(run)], capfd)
    # The report of both runs has the whole one, and warns of the damaged one unless its file is JSON of another form.
    assert main(["report", str(tmp_path / "runs"), f"--output={tmp_path / 'report'}"]) == 0
    if damage == "half":
        assert str(path) in capfd.readouterr().err
    if damage == "a directory":
        assert str(path) in _read_error(["test", f"--resume={run}"], capfd)
    elif damage in ("half", "a list"):  # a file that is no JSON, and JSON of another form, stand for the other damages
        assert main(["test", f"--resume={run}"]) == 0
        assert json.loads(path.read_text())["results"].keys() == before.keys()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_damaged_config_is_named_when_a_run_resumes(
    run: Path, finished_test: Path, tmp_path: Path, command: str, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if command == "test":
        run = Path(shutil.copytree(finished_test, tmp_path / "runs" / "quickstart" / "t"))
    DAMAGES[damage](run / "config.yaml")
    line = _read_error([command, f"--resume={run}"], capfd)
    assert str(run) in line
    assert "resume: " in line
    if command == "test":
        assert main(["report", str(run)]) == 0  # which needs the results alone


@pytest.mark.parametrize("damage", ["half", "a list", "a directory"])
def test_a_damaged_environment_changes_no_result(run: Path, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = run / "environment.json"
    DAMAGES[damage](path)
    if damage == "a directory":
        assert str(path) in _read_error(["fit", f"--resume={run}", "--trainer.max_steps=6"], capfd)
    else:
        assert main(["fit", f"--resume={run}", "--trainer.max_steps=6"]) == 0
        assert json.loads(path.read_text())["resumed"]


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], Path]]:
    """Return a function that makes a directory read-only, with its contents, for processes without root's rights."""
    changed: list[Path] = []

    def change(directory: Path) -> Path:
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
            changed.append(path)
        return directory

    yield change
    for path in changed:
        path.chmod(0o755)


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize("case", ["a run", "its checkpoints", "its folder", "a callback's", "a test", "an export"])
def test_a_directory_that_may_not_be_written_is_refused_before_work_starts(
    run: Path, finished_test: Path, tmp_path: Path, case: str, read_only: Callable[[Path], Path]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    quickstart = ["--config", QUICKSTART, *TINY]
    overlay = tmp_path / "elsewhere.yaml"
    saver = f"class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {{dirpath: {folder / 'kept'}}}"
    overlay.write_text(f"trainer: {{callbacks: [{{{saver}}}]}}")
    directory, args = {
        "a run": (run, ["fit", f"--resume={run}", "--trainer.max_steps=9"]),
        "its checkpoints": (run / "checkpoints", ["fit", f"--resume={run}", "--trainer.max_steps=9"]),
        "its folder": (folder, ["fit", *quickstart, f"--runs_dir={folder}"]),
        "a callback's": (folder, ["fit", *quickstart, f"--runs_dir={tmp_path}", f"--config={overlay}"]),
        "a test": (folder, ["test", *quickstart, f"--runs_dir={folder}", f"--ckpt_path={run}"]),
        "an export": (folder, ["export", f"--ckpt_path={run}", f"--output={folder / 'exported'}"]),
    }[case]
    read_only(directory)
    assert wait(start(args, tmp_path / "log", drop_root_rights)) == 2
    output = (tmp_path / "log").read_text()
    assert output.count("refusion-lit: error:") == 1
    assert "a directory that can be written" in output
    assert str(directory) in output
    assert "data: " not in output  # no model or data were read
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["checkpoints", "metrics.csv", "config.yaml", "results.json", "environment.json"])
def test_something_else_in_the_place_of_a_run_s_file_is_refused_before_work_starts(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "quickstart" / "v" / name
    path.parent.mkdir(parents=True)
    path.touch() if name == "checkpoints" else path.mkdir()
    line = _read_error(["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}", "--run_version=v"], capfd)
    assert "runs_dir: expected " in line
    assert str(path) in line
    assert path.exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param('{"results": 5}', id="a number for the results"),
        pytest.param('{"results": {"refusion": 5}}', id="a number for the figures of a decoder"),
    ],
)
def test_results_of_another_form_are_written_again_by_a_resumed_test(
    finished_test: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str
) -> None:
    copy = Path(shutil.copytree(finished_test, tmp_path / "runs" / "n" / "t"))
    path = copy / "results.json"
    before = json.loads(path.read_text())["results"]
    path.write_text(content)
    assert str(path) in _read_error(["report", str(copy)], capfd)
    assert main(["test", f"--resume={copy}"]) == 0
    assert json.loads(path.read_text())["results"] == before


@pytest.mark.parametrize("state", [5, "x", [1], {"totals": "x"}, {"totals": [1.0]}, {"call_shapes": [[]]}], ids=str)
def test_damaged_counts_of_an_interrupted_test_are_refused(
    finished_test: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], state: object
) -> None:
    copy = Path(shutil.copytree(finished_test, tmp_path / "runs" / "n" / "t"))
    (copy / "results.json").unlink()
    meta = next(copy.glob("predictions_*.meta.json"))
    values = json.loads(meta.read_text())
    values["progress"]["state"] = state
    meta.write_text(json.dumps(values))
    line = _read_error(["test", f"--resume={copy}"], capfd)
    assert "resume: " in line
    assert str(meta) in line
