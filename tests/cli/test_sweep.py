"""Sweeps as a user runs them."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli import main
from refusion_lit.cli.lightning import parse_only
from refusion_lit.cli.sweep import make_resolver, read_sweep, split_overrides
from refusion_lit.sweeps.launchers import Slurm
from refusion_lit.sweeps.points import plan
from refusion_lit.types import LatencyOptions
from support.forks import start, wait

TINY_OPTIONS: dict[str, object] = {}
"""``TINY`` as options of a sweep's file."""
for option in TINY:
    name, _, value = option.removeprefix("--").partition("=")
    TINY_OPTIONS[name] = yaml.safe_load(value)


def _write(folder: Path, **values: object) -> str:
    """Write a sweep's file that is based on the quickstart; return its path."""
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"base": [QUICKSTART], **values}))
    return str(file)


def test_fit_then_test_with_a_point_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = _write(
        tmp_path,
        subcommands=["fit", "test"],
        options={
            **TINY_OPTIONS,
            "model.decoders.llada": {"class_path": "LLaDA", "init_args": {"steps": 4}},
            "test.model.decoding.allow_mismatch": True,
        },
        entries=[
            {"model.decoders.refusion.slot_size": 4},
            {"model.decoders.refusion.slot_size": 8, "fit.trainer.strategy": "no_such_strategy"},
        ],
    )
    arguments = ["sweep", "--config", sweep, "--directory", str(tmp_path / "out")]
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert "1 of 2 points failed" in output.err
    assert re.search(r"^note: .* failed .*slot_size=8", output.err, re.MULTILINE)
    assert "llada *" in output.out
    assert "refusion *" not in output.out
    assert "* the model was not trained for this decoder" in output.out
    with (tmp_path / "out" / "results.csv").open() as file:
        good, mismatched, bad = csv.DictReader(file)
    assert good["mismatch"] == ""
    assert (good["class"], mismatched["class"], bad["class"]) == ("ReFusion", "LLaDA", "")
    assert "bidirectional attention" in mismatched["mismatch"]
    assert (good["model.decoders.refusion.slot_size"], good["decoder"], good["status"]) == ("4", "refusion", "finished")
    folder = Path(good["folder"])
    figures = json.loads((folder / "test" / "results.json").read_text())
    assert figures["decoders"]["refusion"]["slot_size"] == 4
    assert float(good["tokens_per_forward"]) == figures["results"]["refusion"]["tokens_per_forward"]
    assert json.loads((folder / "test" / "environment.json").read_text())["seed"] == 0
    resolved = yaml.safe_load((folder / "test" / "config.yaml").read_text())
    assert resolved["ckpt_path"] == str(folder / "fit" / "checkpoints" / "last.ckpt")
    assert bad["status"] == "failed"
    assert "no_such_strategy" in bad["error"]
    # Starting again is refused; a sweep of other points may go on in the directory, and leaves these points there.
    assert main(arguments) == 2
    assert "add --resume" in capsys.readouterr().err
    changed = _write(tmp_path, subcommands=["test"], entries=[{"seed_everything": 1}])
    monkeypatch.setattr("refusion_lit.sweeps.running._launch", lambda *_: None)  # runs no point
    assert main(["sweep", "--config", changed, "--directory", str(tmp_path / "out"), "--resume"]) == 1
    assert "2 points of other options stay in" in " ".join(capsys.readouterr().err.split())
    assert (folder / "test" / "results.json").is_file()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"model.decoders.refusion.slot_sice": [4]}, "slot_size"),
        ({"model.sampling.max_new_tokns": [4]}, "max_new_tokens"),
        ({"data.batch_size": [8, "many"]}, "data.batch_size=many"),
        ({"model.decoders.refusion.slot_size": [4, 0]}, "slot_size=0"),
        ({"model.sampling.max_new_tokens": [0]}, "max_new_tokens=0"),
        (
            {"model.decoders.refusion.slot_threshold": [1.5]},
            "slot_threshold=1.5: slot_threshold: expected a number in",
        ),
        ({"model.decoders.refusion.num_serial_blocks": [99]}, "num_serial_blocks: expected at most "),
        ({"trainer.logger": [False]}, "trainer.logger: expected the default loggers"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    grid: dict[str, list[object]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["sweep", "--config", _write(tmp_path, grid=grid), "--directory", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"point {next(iter(grid))}=" in error
    assert len(error.splitlines()) == 1
    assert not out.exists()


def test_values_stay_as_written_and_components_keep_their_defaults(tmp_path: Path) -> None:
    grid = {"model.x": ["8", 8, "null"]}
    sweep = read_sweep(Path(_write(tmp_path, grid=grid, launcher="Slurm", latency={"batch_sizes": [1, 4]})))
    assert sweep.grid == grid, "a text stays a text"
    assert sweep.launcher == Slurm()
    assert sweep.latency == LatencyOptions(batch_sizes=(1, 4))


def test_no_point_tests_the_checkpoint_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "shared"}}
    options = {"options": {"trainer.callbacks": [saver]}, "grid": {"seed_everything": [0, 1]}}
    file = _write(tmp_path, subcommands=["fit", "test"], **options)
    assert main(["sweep", "--config", file, "--directory", str(tmp_path / "out"), "--dry_run"]) == 2
    assert "trainer.callbacks: expected no dirpath, which all points would share, got" in capsys.readouterr().err


def test_dry_run_of_the_example(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["sweep", "--config", str(tmp_path / "configs" / "sweep" / "quickstart.yaml"), "--dry_run"]
    arguments += ["--directory", str(tmp_path / "out")]
    assert main(["init", str(tmp_path)]) == 0
    assert main(arguments) == 2
    assert "ckpt_path: expected a checkpoint or directory that exists, or a hub id, got" in capsys.readouterr().err
    checkpoint = tmp_path / "runs" / "quickstart" / "first" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "[6/6]" in text
    assert text.count(" -m refusion_lit.cli test --config=") == 6
    assert not (tmp_path / "out").exists()


def test_decoders_from_files_and_linked_options_resolve(tmp_path: Path) -> None:
    (tmp_path / "llada.yaml").write_text((REPOSITORY / "configs" / "decoder" / "llada.yaml").read_text())
    entries = [
        {"model.decoders.main": "./llada.yaml", "model.sampling.max_new_tokens": 32},
        {"model.decoders.main": {"class_path": "Autoregressive"}, "model.sampling.max_new_tokens": 16},
    ]
    file = Path(_write(tmp_path, entries=entries, launcher="Local"))
    sweep = read_sweep(file)
    llada, autoregressive = (point.configs["test"]["model"] for point in plan(sweep, tmp_path, make_resolver()))
    assert llada["decoders"]["main"]["class_path"].endswith("LLaDA")
    assert llada["decoders"]["main"]["init_args"]["block_length"] == 32
    assert (llada["sampling"]["max_new_tokens"], autoregressive["sampling"]["max_new_tokens"]) == (32, 16)
    assert autoregressive["decoders"]["main"]["class_path"].endswith("Autoregressive")
    assert llada["decoders"].keys() == {"refusion", "main"}


def test_options_of_a_decoder_of_ones_own_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import path in ``options`` names a class for the points; reading the file creates nothing of it."""
    source = "@dataclass(frozen=True, kw_only=True)\nclass Own(OneShot):\n    window: int = 8\n"
    (tmp_path / "swept.py").write_text(f"from docs.examples.one_shot import *\n\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"model.decoders": {"mine": {"class_path": "swept.Own"}}}
    file = Path(_write(tmp_path, options=options, grid={"model.decoders.mine.window": [4, 16]}, launcher="Local"))
    points = plan(read_sweep(file), tmp_path, make_resolver())
    actual = [point.configs["test"]["model"]["decoders"]["mine"] for point in points]
    assert [(decoder["class_path"], decoder["init_args"]["window"]) for decoder in actual] == [
        ("swept.Own", 4),
        ("swept.Own", 16),
    ]


@pytest.mark.parametrize("option", ["model.objective.eps", "test.model.objective.eps", "model.objective.init_args.eps"])
def test_a_swept_component_keeps_options_that_are_written_before_it(option: str, tmp_path: Path) -> None:
    grid = {"model.objective": ["Hybrid", "Masked"]}
    resolve = make_resolver()
    for shared, swept in (({option: 0.5}, {}), ({}, {option: [0.5, 0.25]})):
        file = Path(_write(tmp_path, options=shared, grid={**swept, **grid}, launcher="Local"))
        actual = []
        for point in plan(read_sweep(file), tmp_path, resolve):
            objective = point.configs["test"]["model"]["objective"]
            actual.append((objective["class_path"].rpartition(".")[2], objective["init_args"]["eps"]))
        values = sorted(swept.get(option, [0.5]))
        assert sorted(actual) == [(name, eps) for name in ("Hybrid", "Masked") for eps in values]


def test_a_component_replaces_another_of_its_class_as_a_whole(tmp_path: Path) -> None:
    serial = {"model.decoders.refusion.num_serial_blocks": 2, "model.decoders.refusion.slot_size": 4}
    whole = {"refusion": {"class_path": "ReFusion", "init_args": {"slot_size": 4}}}
    file = Path(_write(tmp_path, entries=[serial, {"model.decoders": whole}], launcher="Local"))
    points = plan(read_sweep(file), tmp_path, make_resolver())
    decoders = [point.configs["test"]["model"]["decoders"]["refusion"]["init_args"] for point in points]
    assert [(decoder["slot_size"], decoder["num_serial_blocks"]) for decoder in decoders] == [(4, 2), (4, None)]


def test_a_swept_seed_replaces_all_seeds_of_the_base(tmp_path: Path) -> None:
    """A run's own config names all options, and model.seed and data.seed would be the same in all points."""
    base = {**yaml.safe_load(Path(QUICKSTART).read_text()), "seed_everything": 0}
    base["model"]["seed"] = base["data"]["seed"] = 0
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    resolve, seeds = make_resolver(), []
    for values in (
        {"grid": {"seed_everything": [1, 2]}},
        {"options": {"test.seed_everything": 3, "data.seed": 4}},
        {"options": {"data.task.num_test": 5}},
    ):
        file = Path(_write(tmp_path, **{"base": ["base.yaml"], "launcher": "Local", **values}))
        for point in plan(read_sweep(file), tmp_path, resolve):
            config = point.configs["test"]
            seeds.append((config["seed_everything"], config["model"]["seed"], config["data"]["seed"]))
    assert seeds == [(1, 1, 1), (2, 2, 2), (3, 3, 4), (0, 0, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: [1]", "grid"),
        ("gird: {a: [1]}", "did you mean 'grid'"),
        ("num_samples: 2", "unknown option 'num_samples'"),
        ("launcher: Locl", "Locl"),
        ("a: [", "); correct the file."),
        ("- 1", "got list; write them as NAME: VALUE."),
    ],
)
def test_a_wrong_sweep_file_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    assert main(["sweep", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_decoder_is_given_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(REPOSITORY / "configs" / "decoder" / "llada.yaml")
    for args in ([f"--model.decoders.x={file}"], ["--model.decoders.x", file]):
        cli = parse_only()
        decoders = cli.parse(["test", "--config", QUICKSTART, *args]).test.model.decoders
        assert decoders["x"].class_path.endswith("LLaDA")
        assert decoders["x"].init_args.block_length == 32
        assert decoders["refusion"].class_path.endswith("ReFusion")
    assert main(["test", "--config", QUICKSTART, "--model.decoders.x", str(tmp_path / "no.yaml")]) == 2
    assert "model.decoders.x: expected a YAML file, got" in capsys.readouterr().err
    (tmp_path / "other.yaml").write_text("steps: 3")
    assert main(["test", "--config", QUICKSTART, f"--model.decoders.x={tmp_path / 'other.yaml'}"]) == 2
    assert "expected a component" in capsys.readouterr().err


def test_an_interrupt_says_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("refusion_lit.cli.sweep.run_sweep", interrupt)
    file = _write(tmp_path)
    assert main(["sweep", "--config", file]) == 130
    assert f"refusion-lit sweep --config {file} --resume" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="finds the point's processes in /proc")
def test_a_sweep_killed_in_the_middle_resumes_to_the_results_of_an_undisturbed_one(tmp_path: Path) -> None:
    options = {**TINY_OPTIONS, "trainer.max_steps": 12}
    grid = {"model.decoders.refusion.slot_size": [4, 8]}
    file = _write(tmp_path, subcommands=["fit", "test"], options=options, grid=grid)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    args = ["sweep", "--config", file, "--directory"]
    assert main([*args, str(whole)]) == 0
    process = start([*args, str(killed)], tmp_path / "log")
    second = killed / "points" / json.loads((whole / "sweep.json").read_text())["points"][1]
    while process.is_alive() and not (second / "fit" / "metrics.csv").is_file():
        time.sleep(0.005)
    process.kill()
    for pid in _find_processes(second / "log.txt"):
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    assert wait(process) == -signal.SIGKILL
    assert len(list(killed.glob("points/*/outcome.json"))) == 1  # of the first point alone
    assert not (killed / "results.csv").exists()
    assert main([*args, str(killed), "--resume"]) == 0
    assert _results(killed) == _results(whole)


def _find_processes(output: Path) -> list[int]:
    """Return the identifiers of the processes that print to a file, of which there is at least one."""
    pids = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if link.readlink() == output:
                pids.append(int(link.parts[2]))
    assert pids
    return pids


def _results(directory: Path) -> tuple[list[dict[str, str]], list[dict[str, object]]]:
    """Return a sweep's table and predictions, without times and places."""
    with (directory / "results.csv").open() as file:
        rows = [{k: v for k, v in row.items() if k not in VARYING} for row in csv.DictReader(file)]
    lines = [line for path in sorted(directory.glob("points/*/test/*.jsonl")) for line in path.read_text().splitlines()]
    return rows, [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


VARYING = {"folder", "point_seconds", "seconds", "tokens_per_second", "latency_median", "latency_p95"}


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_cannot_be_one_is_refused_before_points_run(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    args = ["sweep", "--config", _write(tmp_path), "--directory", str(tmp_path / name)]
    for resume in ([], ["--resume"]):
        assert main([*args, *resume]) == 2
        error = capsys.readouterr().err
        assert "directory: expected a directory" in error
        assert str(tmp_path / "file") in error
        assert len(error.splitlines()) == 1


def test_options_of_the_command_line_replace_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path, options={"data.task.num_test": 200}, grid={"model.sampling.max_new_tokens": [4, 8, 16]})
    args = ["sweep", "--config", file, "--directory", str(tmp_path / "out"), "--dry_run"]
    options = ["--data.task.num_test", "60", "--model.sampling.max_new_tokens=[32, 64]", "--seed_everything=3"]
    assert main([*args, *options]) == 0
    text = capsys.readouterr().out
    assert "[2/2]" in text
    assert "max_new_tokens=64" in text
    rest, overrides = split_overrides([*args[1:], *options])
    assert rest == args[1:]
    (first, _) = plan(read_sweep(Path(file)).override(overrides), tmp_path, make_resolver())
    config = first.configs["test"]
    assert (config["data"]["task"]["init_args"]["num_test"], config["seed_everything"]) == (60, 3)
    assert main([*args, "--data.task.num_tst=60"]) == 2
    assert "num_test" in capsys.readouterr().err
    assert main([*args, "--data.task.num_test"]) == 2
    assert "data.task.num_test: expected a value" in capsys.readouterr().err
