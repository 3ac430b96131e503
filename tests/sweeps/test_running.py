"""Running the points of a sweep with a fake command: results, failures, interruption and resumption."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from refusion_lit.sweeps.launchers import Launcher, Local, Slurm
from refusion_lit.sweeps.points import Point, Sweep, plan
from refusion_lit.sweeps.running import TableRow, _input_states, list_points, locate_points, run
from refusion_lit.utils.files import acquire_lock
from sweeps.conftest import resolve


def _run(tmp_path: Path, module: str, journal: Path, *, resume: bool = False, **options: Any) -> list[TableRow]:
    options["options"] = {"journal": str(journal), **options.get("options", {})}
    return run(
        Sweep(**options),
        directory=tmp_path / "sweep",
        resolve=resolve,
        resume=resume,
        module=module,
        console=Console(file=io.StringIO()),
    )


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(condition: Any, seconds: int = 20) -> None:
    for _ in range(20 * seconds):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("timed out")


@pytest.mark.parametrize("launcher", [Local(num_workers=2), Slurm(num_workers=2, cluster="local")])
def test_points_run_and_make_one_table(tmp_path: Path, module: str, journal: Path, launcher: Launcher) -> None:
    if isinstance(launcher, Slurm):
        pytest.importorskip("submitit")
    rows = _run(tmp_path, module, journal, grid={"x": [1, 2, 3]}, launcher=launcher)
    assert [(row["x"], row["decoder"], row["score"]) for row in rows] == [
        (x, decoder, sign * x**2) for x in (1, 2, 3) for decoder, sign in (("a", 1), ("b", -1))
    ]
    assert {(row["status"], row["seed"], row["error"]) for row in rows} == {("finished", 0, None)}
    assert {row["decoder"]: row["mismatch"] for row in rows} == {
        "a": "", "b": "another attention; another block size",
    }  # fmt: skip
    assert sorted(line.split()[1] for line in journal.read_text().splitlines()) == ["1", "2", "3"]
    with (tmp_path / "sweep" / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["point"], row["x"], row["score"]) for row in table] == [
        (row["point"], str(row["x"]), str(row["score"])) for row in rows
    ]


def test_points_that_run_concurrently_have_no_speeds(tmp_path: Path, module: str, journal: Path) -> None:
    rows = _run(tmp_path, module, journal, grid={"x": [1, 2]}, launcher=Local(num_workers=4))
    assert {row.get("seconds") for row in rows} == {None}
    rows = _run(tmp_path, module, journal, resume=True, grid={"x": [1, 2, 3]}, launcher=Local(num_workers=4))
    assert [row["seconds"] for row in rows[-2:]] == [1e6, 2e6]  # the third point ran alone
    assert {row["seconds"] for row in rows[:-2]} == {None}


def test_test_uses_the_checkpoint_of_fit(tmp_path: Path, module: str, journal: Path) -> None:
    rows = _run(tmp_path, module, journal, options={"x": 3}, subcommands=["fit", "test"])
    assert [line.split()[0] for line in journal.read_text().splitlines()] == ["fit", "test"]
    assert [row["score"] for row in rows] == [3**2 + 1, -(3**2) - 1]  # the fake adds 1 if it gets the checkpoint


def test_a_failed_point_is_reported_and_the_others_run(tmp_path: Path, module: str, journal: Path) -> None:
    rows = _run(tmp_path, module, journal, grid={"x": [1, 2, 3]}, options={"broken": 2})
    # The fake's results say that its decoders took a million seconds and more; the point's own time is measured.
    assert [row["seconds"] for row in rows] == [1e6, 2e6, None, 1e6, 2e6]
    assert all(0 < row["point_seconds"] < 1e6 for row in rows)
    assert [(row["x"], row["status"]) for row in rows] == [
        (1, "finished"), (1, "finished"), (2, "failed"), (3, "finished"), (3, "finished"),
    ]  # fmt: skip
    error = rows[2]["error"]
    assert "exit code 1" in error
    assert "x is broken" in error
    again = _run(tmp_path, module, journal, resume=True, grid={"x": [1, 2, 3]}, options={"broken": 2})
    assert [(row["point"], row["status"]) for row in again] == [(row["point"], row["status"]) for row in rows]
    assert journal.read_text().count("test 2 ") == 2
    assert journal.read_text().count("test 1 ") == 1


def test_a_finished_point_is_never_run_twice(tmp_path: Path, module: str, journal: Path) -> None:
    _run(tmp_path, module, journal, grid={"x": [1, 2]})
    with pytest.raises(ValueError, match="exists; add --resume"):
        _run(tmp_path, module, journal, grid={"x": [1, 2]})
    grown = _run(tmp_path, module, journal, resume=True, grid={"x": [1, 2, 4]})
    assert [line.split()[1] for line in journal.read_text().splitlines()] == ["1", "2", "4"]
    assert [row["x"] for row in grown] == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("name", ["last.ckpt", "weights", "rows.jsonl"])
def test_a_finished_point_is_run_again_if_its_checkpoint_or_data_have_changed(
    tmp_path: Path, module: str, journal: Path, name: str
) -> None:
    checkpoint = tmp_path / "model" / name
    checkpoint.parent.mkdir()
    data = {"task": {"class_path": "InstructionFiles", "init_args": {"test": [str(checkpoint)]}}}
    source = {"last.ckpt": {"ckpt_path": str(checkpoint.parent)}, "weights": {"ckpt_path": str(checkpoint)}}
    options = {"x": 1, **source.get(name, {"data": data})}
    for content, expected in (("one", ["1"]), ("one", ["1"]), ("other", ["1", "1"])):
        (checkpoint.parent / "report.html").write_text(f"changes no result: {expected}")
        if not checkpoint.exists() or checkpoint.read_text() != content:
            checkpoint.write_text(content)
        _run(tmp_path, module, journal, resume=True, options=options)
        assert [line.split()[1] for line in journal.read_text().splitlines()] == expected
    before = journal.read_text().splitlines()
    checkpoint.unlink()  # a file that is gone, perhaps with its disk, is no changed file: the result stays
    rows = _run(tmp_path, module, journal, resume=True, options=options)
    assert {row["status"] for row in rows} == {"finished"}
    assert journal.read_text().splitlines() == before


@pytest.mark.parametrize("option", ["model.backbone.source", "model.backbone.draft", "model.decoding.verifier"])
def test_all_weights_that_a_point_names_count(tmp_path: Path, option: str) -> None:
    weights = tmp_path / "model.safetensors"
    config: Any = str(tmp_path)
    for name in reversed(option.split(".")):
        config = {name: config}
    point = Point(id="a", options={}, configs={"test": config})
    states = []
    for content in ("one", "other"):
        weights.write_text(content)
        states.append(_input_states(point))
    assert states[0].keys() == states[1].keys() == {str(weights)}
    assert states[0] != states[1]


def test_nothing_runs_if_a_point_is_invalid(tmp_path: Path, module: str, journal: Path) -> None:
    with pytest.raises(ValueError, match="point x=1, y=2"):
        _run(tmp_path, module, journal, grid={"x": [1], "y": [2]})
    assert not (tmp_path / "sweep").exists()


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path, module: str, journal: Path) -> None:
    lock = acquire_lock(tmp_path / "sweep" / "lock", "directory", "other sweep", "wait")
    with pytest.raises(ValueError, match=r"directory: expected no other sweep in .* still running"):
        _run(tmp_path, module, journal, resume=True, options={"x": 1})
    lock.release()
    assert {row["status"] for row in _run(tmp_path, module, journal, resume=True, options={"x": 1})} == {"finished"}


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from sweeps.conftest import resolve
from refusion_lit.sweeps.launchers import Local
from refusion_lit.sweeps.points import Sweep
from refusion_lit.sweeps.running import run
options = {{"journal": {journal!r}, "waits_for": {gate!r}}}
sweep = Sweep(options=options, grid={{"x": [1, 2]}}, launcher=Local(num_workers=2))
run(sweep, directory={directory!r}, resolve=resolve, module={module!r})
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Return the file that the driver's points wait for."""
    return tmp_path / "gate"


@pytest.fixture
def driver(tmp_path: Path, module: str, journal: Path, gate: Path) -> subprocess.Popen[bytes]:
    """Return a sweep in its own process, with both points running."""
    tests = str(Path(__file__).parents[1])
    directory = str(tmp_path / "sweep")
    text = DRIVER.format(tests=tests, journal=str(journal), gate=str(gate), directory=directory, module=module)
    script = tmp_path / "driver.py"  # without a guard against a second import, as people write scripts
    script.write_text(text)
    process = subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL)
    _wait_for(lambda: len(journal.read_text().splitlines()) == 2, seconds=120)  # three processes start
    return process


def test_an_interrupt_stops_whole_process_groups(driver: subprocess.Popen[bytes], journal: Path) -> None:
    pids = [int(line.split()[2]) for line in journal.read_text().splitlines()]
    assert all(map(_alive, pids))
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=20) != 0
    _wait_for(lambda: not any(map(_alive, pids)))


def test_points_that_outlived_their_sweep_are_not_run_again(
    driver: subprocess.Popen[bytes], tmp_path: Path, module: str, journal: Path, gate: Path
) -> None:
    pids = [int(line.split()[2]) for line in journal.read_text().splitlines()]
    driver.kill()
    driver.wait(timeout=20)
    assert all(map(_alive, pids))
    sweep = Sweep(options={"journal": str(journal), "waits_for": str(gate)}, grid={"x": [1, 2]})
    shown = Console(file=io.StringIO())
    with pytest.raises(ValueError, match=r"resume: expected no process of an earlier sweep in .* still running"):
        run(sweep, directory=tmp_path / "sweep", resolve=resolve, resume=True, module=module, console=shown)
    for pid in pids:
        os.killpg(os.getpgid(pid), signal.SIGKILL)


@pytest.mark.parametrize("num_killed", [0, 1, 2])
def test_a_killed_sweep_resumes_to_its_end(
    tmp_path: Path, module: str, journal: Path, gate: Path, driver: subprocess.Popen[bytes], num_killed: int
) -> None:
    pids = [int(line.split()[2]) for line in journal.read_text().splitlines()]
    groups = [os.getpgid(pid) for pid in pids]
    driver.kill()
    driver.wait(timeout=20)
    for group in groups[:num_killed]:
        os.killpg(group, signal.SIGKILL)
    gate.touch()  # the others end by themselves
    _wait_for(lambda: len([*tmp_path.glob("sweep/points/*/outcome.json")]) == 2 - num_killed)
    _wait_for(lambda: not any(map(_alive, [*pids, *groups])))
    options = {"options": {"waits_for": str(gate)}, "grid": {"x": [1, 2]}}
    rows = _run(tmp_path, module, journal, resume=True, **options)
    assert [(row["x"], row["status"], row["score"]) for row in rows] == [
        (x, "finished", sign * x**2) for x in (1, 2) for sign in (1, -1)
    ]
    assert len(journal.read_text().splitlines()) == 2 + num_killed  # nothing that had ended ran again


@pytest.mark.parametrize("content", [b"", b'{"results": {"a": ', b"[]", b'{"results": 3}', b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("name", ["test/results.json", "outcome.json"])
def test_a_point_whose_results_are_damaged_runs_again(
    tmp_path: Path, module: str, journal: Path, name: str, content: bytes
) -> None:
    before = _run(tmp_path, module, journal, grid={"x": [1, 2]})
    (tmp_path / "sweep" / "points" / before[0]["point"] / name).write_bytes(content)
    for file in ("sweep.json", "results.csv"):
        (tmp_path / "sweep" / file).write_bytes(content)
    rows = _run(tmp_path, module, journal, resume=True, grid={"x": [1, 2]})
    assert [(row["point"], row["score"]) for row in rows] == [(row["point"], row["score"]) for row in before]
    assert [line.split()[1] for line in journal.read_text().splitlines()] == ["1", "2", "1"]


def test_a_worker_that_dies_without_a_result_is_a_failure(
    tmp_path: Path, make_module: Callable[[str], str], journal: Path
) -> None:
    # The module kills its whole process group, as the kernel may when memory runs out.
    module = make_module("import os, signal; print('last words', flush=True); os.killpg(0, signal.SIGKILL)")
    rows = _run(tmp_path, module, journal, options={"x": 1})
    assert rows[0]["status"] == "failed"
    assert "exit code -9" in rows[0]["error"]
    assert "last words" in rows[0]["error"]


def test_the_exit_functions_of_a_point_run(tmp_path: Path, make_module: Callable[[str], str], journal: Path) -> None:
    """Some loggers upload their last lines there."""
    left = tmp_path / "left"
    module = make_module(f"import atexit, pathlib; atexit.register(pathlib.Path({str(left)!r}).touch)")
    _run(tmp_path, module, journal, options={"x": 1})
    assert left.exists()


def test_a_point_is_not_told_that_its_job_is_one_task(
    tmp_path: Path, make_module: Callable[[str], str], journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``SLURM_NTASKS=1``, Lightning would start no further processes for its devices."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    module = make_module("import os, sys; sys.exit(4 if 'SLURM_NTASKS' in os.environ else 3)")
    assert "exit code 3" in _run(tmp_path, module, journal, options={"x": 1})[0]["error"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_point_that_ends_has_a_line(tmp_path: Path, module: str, journal: Path, is_terminal: bool) -> None:
    shown = io.StringIO()
    sweep = Sweep(options={"journal": str(journal), "broken": 2}, grid={"x": [1, 2]})
    console = Console(file=shown, force_terminal=is_terminal, width=200)
    run(sweep, directory=tmp_path / "sweep", resolve=resolve, module=module, console=console)
    assert re.search(r"\[1/2\] finished in \d\.\d s: x=1\b", shown.getvalue())
    assert re.search(r"\[2/2\] failed in \d\.\d s: x=2\b", shown.getvalue())
    assert "exit code 1:\nworking on 2\nx is broken" in shown.getvalue()
    assert ("\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown.getvalue()) == is_terminal


def test_description_lists_points_with_their_commands(tmp_path: Path, module: str, journal: Path) -> None:
    _run(tmp_path, module, journal, grid={"x": [1]})
    points = plan(Sweep(options={"journal": str(journal)}, grid={"x": [1, 5]}), tmp_path, resolve)
    text = list_points(locate_points(tmp_path / "sweep", points), module)
    assert f"[1/2] {points[0].id} (finished) x=1" in text
    assert f"[2/2] {points[1].id} (to run) x=5" in text
    assert f"test --config={tmp_path}/sweep/points/{points[1].id}/test.yaml" in text
    stored = json.loads((tmp_path / "sweep" / "points" / points[0].id / "point.json").read_text())
    assert " ".join(stored["commands"]["test"]) in text


def test_slurm_is_refused_on_a_machine_without_slurm(
    tmp_path: Path, module: str, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="without srun; use Local"):
        _run(tmp_path, module, journal, options={"x": 1}, launcher=Slurm())
