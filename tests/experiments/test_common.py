"""What experiments share, and the study that records an environment for each of its trainings."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from refusion_lit.decoding import ReFusion
from refusion_lit.tasks import Example
from refusion_lit.types import SamplingParams

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
SCRIPTS = sorted(
    path
    for path in EXPERIMENTS.glob("*/*.py")
    if all(text in path.read_text() for text in ("from experiments.common import", "__main__"))
)


def import_scripts(folder: Path) -> None:
    """Import each script in a folder as if it were the one that runs: its own folder is the first on the path."""
    os.chdir(folder)
    paths = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests", folder)]
    for script in SCRIPTS:
        sys.path[:] = [str(script.parent), *paths]
        for name, module in list(sys.modules.items()):
            if "/experiments/" in (getattr(module, "__file__", None) or "") or name.startswith("experiments"):
                del sys.modules[name]
        runpy.run_path(str(script), run_name="imported")


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("experiments.common")


@pytest.fixture
def latin(common: ModuleType) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Return run.py and plot.py of the study of Latin squares."""
    names = ("experiments.latin_study.run", "experiments.latin_study.plot")
    run, plot = map(importlib.import_module, names)
    yield run, plot
    for name in names:
        sys.modules.pop(name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer versions of Python warn of forks
def test_scripts_find_the_shared_module_from_any_folder(tmp_path: Path) -> None:
    assert len(SCRIPTS) > 5
    # A fork has the libraries imported, which take most of a new process's time.
    process = multiprocessing.get_context("fork").Process(target=import_scripts, args=(tmp_path,))
    process.start()
    process.join(300)
    assert process.exitcode == 0  # the traceback is in the captured output


def test_a_killed_training_resumes_and_a_finished_one_is_not_repeated(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, commands = tmp_path / "runs" / "walk" / "fit", []

    def command(*args: str, **environment: str) -> None:
        commands.append((args, environment))
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / "last.ckpt").touch()
        if len(commands) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(common, "command", command)
    with pytest.raises(KeyboardInterrupt):
        common.train(run, "--a=1", PYTHONPATH="b")
    last = run / "checkpoints" / "last.ckpt"
    assert [common.train(run, "--a=1", PYTHONPATH="b") for _ in range(2)] == [last, last]
    place = ("--runs_dir", str(tmp_path / "runs"), "--run_name", "walk", "--run_version", "fit")
    first = ("fit", "--a=1", *place)
    assert commands == [(first, {"PYTHONPATH": "b"}), ((*first, "--ckpt_path", "last"), {"PYTHONPATH": "b"})]


def test_the_positions_of_steps_are_those_that_a_training_counts(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--data.task.num_train=64"]
    options += ["--trainer.max_steps=2", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=2"]
    positions = common.step_positions(options, 2)
    assert not (tmp_path / "runs").exists(), "nothing runs"
    common.train(tmp_path / "runs" / "counted" / "fit", *options)
    logged = (tmp_path / "runs" / "counted" / "fit" / "metrics.csv").read_text().splitlines()
    names = logged[0].split(",")
    counted = [dict(zip(names, line.split(","), strict=True))["train/num_positions"] for line in logged[1:]]
    assert [float(count) for count in counted if count] == [positions[0], sum(positions)]


def test_commands_that_compute_have_one_thread(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(common.subprocess, "run", lambda args, check, env: runs.append((args[3:], env)))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    common.command("test", "--a", OTHER="c")
    common.command("export", "--b")
    assert [args for args, _ in runs] == [["test", "--a", "--num_threads", "1"], ["export", "--b"]]
    assert [env["OMP_NUM_THREADS"] for _, env in runs] == ["1", "1"]
    assert [env.get("OTHER") for _, env in runs] == ["c", None]


def test_a_finished_part_is_kept_and_a_failed_one_made_again(common: ModuleType, tmp_path: Path) -> None:
    path, made = tmp_path / "parts" / "hybrid, slots of 1.json", []

    def make(value: int) -> dict[str, int]:
        made.append(value)
        if value == 0:
            raise KeyboardInterrupt
        return {"value": value}

    with pytest.raises(KeyboardInterrupt):
        common.kept(path, make, 0)
    assert [common.kept(path, make, value) for value in (1, 2)] == [{"value": 1}] * 2
    assert made == [0, 1]


def test_figures_weigh_examples_by_their_tokens(common: ModuleType) -> None:
    rows = [
        SimpleNamespace(text="a", num_tokens=1, num_forwards=1, num_positions=10),
        SimpleNamespace(text="b", num_tokens=9, num_forwards=3, num_positions=10),
    ]
    model = SimpleNamespace(encode=lambda text: [1], decode=lambda *args, **options: SimpleNamespace(rows=rows))
    examples = [Example(id=name, query="q", response="a") for name in "01"]
    scores, figures = common.decode_examples(
        model, examples, lambda e, text: float(text == e.response), ReFusion(), SamplingParams(max_new_tokens=9)
    )
    assert scores == [1.0, 0.0]
    assert figures == {"score": 0.5, "tokens_per_forward": 2.5, "positions_per_token": 2.0}


def test_each_variant_keeps_its_own_environment(
    latin: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = latin
    first, second, old = list(run.VARIANTS)[:3]
    work, output = tmp_path / "work", tmp_path / "results.json"
    figures = {"almost sure": {"score": 0.5, "tokens_per_forward": 1.5}}
    today: dict[str, str] = {}
    work.mkdir()
    (work / f"{old}.json").write_text(json.dumps(figures))  # of before entries had an environment

    def train(run: Path, *options: str, **environment: str) -> Path:
        (run / "checkpoints").mkdir(parents=True)
        (run / "environment.json").write_text(json.dumps({**today, "command": ["/home/me"]}))
        return run / "checkpoints" / "last.ckpt"

    monkeypatch.setattr(run, "positions_a_step", lambda options: 100)
    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(run, "measure", lambda *args: figures)
    monkeypatch.setattr(run, "environment", lambda seed, command: dict(today))
    for day, names in (("monday", [first]), ("tuesday", [first, second, old])):
        today["git"] = day
        monkeypatch.setattr(sys, "argv", ["run.py", f"--work_dir={work}", f"--output={output}", "--only", *names])
        run.main()
    result: dict[str, Any] = json.loads(output.read_text())
    for name, day in ((first, "monday"), (second, "tuesday")):
        environments = {"training": {"git": day}, "decoding": {"git": day}}
        assert result["results"][name] == {**figures, "environment": environments}
    assert result["results"][old] == figures
    assert "environment" not in result  # there is none of all variants


def test_the_table_reads_entries_with_and_without_environment(latin: tuple[ModuleType, ModuleType]) -> None:
    _, plot = latin
    committed = json.loads((EXPERIMENTS / "latin_study" / "results.json").read_text())
    next(iter(committed["results"].values()))["environment"] = {"training": {}, "decoding": {}}
    table = plot.table(committed)
    assert table.count("\n") == len(committed["results"]) + 1
    assert table in (EXPERIMENTS / "latin_study" / "table.md").read_text()


def places(values: Any) -> Iterator[str]:
    """Yield the texts in a JSON value that are absolute paths."""
    if isinstance(values, str) and re.fullmatch(r"/([\w.+-]+/)+[\w.+-]+", values):
        yield values
    elif isinstance(values, dict):
        yield from places([*values.values()])
    elif isinstance(values, list):
        for value in values:
            yield from places(value)


def test_committed_results_name_no_places_of_the_machine() -> None:
    results = [*EXPERIMENTS.glob("*/*.json"), *(ROOT / "benchmarks" / "results").glob("*.json")]
    assert len(results) > 20
    assert list(places({"working_directory": "/home/me/project", "text": "3/4"})) == ["/home/me/project"]
    for path in results:
        assert list(places(json.loads(path.read_text()))) == [], path


def test_a_run_s_environment_is_read_without_places(tmp_path: Path) -> None:
    from experiments.common import read_environment

    recorded = {
        "python": "3.11",
        "command": ["/home/me"],
        "working_directory": "/home/me",
        "resumed": [{"command": []}],
    }
    (tmp_path / "environment.json").write_text(json.dumps(recorded))
    assert read_environment(tmp_path) == {"python": "3.11"}
