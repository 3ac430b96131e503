"""Runs of the Trainer's commands: where they land, how they are resumed, what is printed at their end."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cli.conftest import QUICKSTART, TINY, TINY_TEST
from refusion_lit.cli import main
from refusion_lit.cli.lightning import RefusionCLI
from refusion_lit.cli.resume import expand_resume
from refusion_lit.cli.run_directory import Claim
from refusion_lit.cli.trainer import _how_to_resume
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.utils.files import acquire_lock, release_lock

# TINY without options of the trainer and of a new model, because these commands read a checkpoint.


def read_step(path: Path) -> int:
    """Return the number of steps after which a checkpoint was saved."""
    return torch.load(path, weights_only=True)["global_step"]


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Return a directory of runs with one finished run, ``quickstart/version_0``, of four steps."""
    shutil.copytree(trained, tmp_path / "quickstart" / "version_0")
    return tmp_path


def fit(runs: Path, *options: str) -> int:
    """Run ``fit`` with the tiny quickstart config, which trains four steps; return the exit code."""
    return main(["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={runs}", *options])


def test_a_fit_is_resumed_in_its_directory_with_its_config(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "quickstart" / "version_0"
    config = (run / "config.yaml").read_text()
    last = run / "checkpoints" / "last.ckpt"
    assert read_step(last) == 4
    for newest_or_named in (["--resume"], ["--resume", "version_0"]):
        num_steps = read_step(last) + 2
        assert fit(runs, f"--trainer.max_steps={num_steps}", *newest_or_named) == 0
        assert read_step(last) == num_steps
    assert main(["fit", f"--resume={run}", "--trainer.max_steps=10"]) == 0
    assert read_step(last) == 10
    assert sorted(path.name for path in run.parent.iterdir()) == ["version_0"]
    assert not list(run.rglob("last-v*"))
    assert (run / "config.yaml").read_text() == config
    assert "beginning" not in capsys.readouterr().err


def test_options_that_a_resumed_run_changes_are_named_and_recorded(runs: Path) -> None:
    run = runs / "quickstart" / "version_0"
    started = json.loads((run / "environment.json").read_text())["command"]
    with pytest.warns(UserWarning, match=r"options that differ .*: model.optimizer.init_args.lr;"):
        assert main(["fit", f"--resume={run}", "--trainer.max_steps=6", "--model.optimizer.lr=0.01"]) == 0
    actual = json.loads((run / "environment.json").read_text())
    assert actual["command"] == started
    [resumption] = actual["resumed"]
    assert resumption["changed"] == {"trainer.max_steps": 6, "model.optimizer.init_args.lr": 0.01}
    # The config's rate holds again if the next resumption does not repeat the option.
    with pytest.warns(UserWarning, match=r"config\.yaml .*: model\.optimizer\.init_args\.lr \(0\.01\)"):
        assert main(["fit", f"--resume={run}", "--trainer.max_steps=8"]) == 0


def test_a_slow_precision_in_a_file_is_replaced_and_on_the_command_line_kept_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    overlay = tmp_path / "mixed.yaml"
    overlay.write_text("trainer: {precision: bf16-mixed}")
    options = ["--config", str(overlay), "--trainer.max_steps=1"]
    assert fit(tmp_path, *options, "--run_version=file") == 0
    assert "trainer.precision: 32-true" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"trainer\.precision: expected 32-true"):
        assert fit(tmp_path, *options, "--run_version=line", "--trainer.precision=bf16-mixed") == 0
    for version, precision in (("file", "32-true"), ("line", "bf16-mixed")):
        config = yaml.safe_load((tmp_path / "quickstart" / version / "config.yaml").read_text())
        assert config["trainer"]["precision"] == precision


def optimizer_rates(run: Path) -> tuple[list[float], list[float], list[float]]:
    """Return base rates, current rates and weight decays of a run's last checkpoint."""
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    groups = state["optimizer_states"][0]["param_groups"]
    assert [group["initial_lr"] for group in groups] == state["lr_schedulers"][0]["base_lrs"]
    lrs, decays = ([group[name] for group in groups] for name in ("lr", "weight_decay"))
    return state["lr_schedulers"][0]["base_lrs"], lrs, decays


@pytest.mark.filterwarnings("ignore:resumed with options that differ")
def test_a_resumed_run_takes_the_optimizer_options_that_it_is_given(runs: Path) -> None:
    run = runs / "quickstart" / "version_0"
    constant = ["--model.schedule.final_lr_ratio=1", "--model.schedule.warmup_steps=0"]
    options = ["--model.optimizer.lr=0.01", "--model.optimizer.weight_decay=0.5", *constant]
    assert main(["fit", f"--resume={run}", "--trainer.max_steps=6", *options]) == 0
    # The two groups of parameters are those with and without weight decay.
    assert optimizer_rates(run) == ([0.01, 0.01], [0.01, 0.01], [0.5, 0.0])


def test_options_that_a_checkpoint_replaces_are_refused_and_not_recorded(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "quickstart" / "version_0"
    scheduler = ["--model.lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR", "--model.lr_scheduler.T_max=9"]
    before = (run / "environment.json").read_text()
    for option, given in (
        ("model.lr_scheduler", scheduler),
        ("model.optimizer", ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"]),
        ("model.backbone.source", ["--model.backbone.source=elsewhere"]),
    ):
        capsys.readouterr()
        assert main(["fit", f"--resume={run}", "--trainer.max_steps=6", *given]) == 2
        assert f"{option}: expected" in capsys.readouterr().err
        assert (run / "environment.json").read_text() == before


def test_damaged_files_of_a_resumed_run_are_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "quickstart" / "version_0"
    resumed = ["fit", f"--resume={run}", "--trainer.max_steps=6"]
    losses = (run / "metrics.csv").read_bytes()
    (run / "metrics.csv").write_bytes(b"\xff")
    assert main(resumed) == 2
    assert f"resume: {run / 'metrics.csv'} is not UTF-8 text" in capsys.readouterr().err
    (run / "metrics.csv").write_bytes(losses)
    for path in run.rglob("*.ckpt"):
        path.write_bytes(b"")
    assert main(resumed) == 2
    error = capsys.readouterr().err
    assert "resume: expected a whole checkpoint, with the optimizer's state, got" in error
    assert "beginning: " not in error
    shutil.rmtree(run / "checkpoints")
    assert main(resumed) == 0
    assert read_step(run / "checkpoints" / "last.ckpt") == 6


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_checkpoint_is_resumed_with_its_own_optimizer(
    optimizer: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "quickstart" / "version_0"
    other = ["--trainer.max_steps=6", f"--model.optimizer=torch.optim.{optimizer}", "--model.optimizer.lr=0.1"]
    assert main(["fit", f"--resume={run}", *other]) == 2
    assert fit(runs, "--run_version=other", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", *other) == 2
    line = f"model.optimizer: expected the optimizer of the checkpoint, got '{optimizer}'"
    assert capsys.readouterr().err.count(line) == 2
    assert sorted(path.name for path in run.parent.iterdir()) == ["version_0"]


@pytest.mark.parametrize("installed", [True, False])
def test_losses_are_written_with_and_without_tensorboard(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:
        monkeypatch.setattr("refusion_lit.cli.run_loggers.find_spec", lambda name: None)
    assert fit(tmp_path, "--trainer.max_steps=1", "--run_version=v") == 0
    run = tmp_path / "quickstart" / "v"
    assert "train/loss" in (run / "metrics.csv").read_text()
    assert bool(list(run.glob("events.out.tfevents.*"))) is installed


def test_the_newest_run_of_the_command_is_resumed(runs: Path) -> None:
    last = runs / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    args = ["--config", QUICKSTART, *TINY_TEST, f"--runs_dir={runs}", f"--ckpt_path={last}", "--data.task.num_test=2"]
    for command in ("test", "predict"):
        assert main([command, *args]) == 0
    for command in ("test", "predict"):
        assert main([command, *args, "--resume"]) == 0  # both runs are complete
    assert fit(runs, "--resume", "--trainer.max_steps=6") == 0
    assert read_step(last) == 6
    assert sorted(path.name for path in last.parents[2].iterdir()) == ["version_0", "version_1", "version_2"]


def test_without_a_run_a_new_one_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(tmp_path, "--resume") == 0
    assert "no checkpoint of quickstart" in capsys.readouterr().err
    assert read_step(tmp_path / "quickstart" / "version_0" / "checkpoints" / "last.ckpt") == 4


def test_a_config_without_callbacks_leaves_a_last_checkpoint(tmp_path: Path) -> None:
    assert fit(tmp_path, "--trainer.callbacks=null") == 0
    run = tmp_path / "quickstart" / "version_0"
    assert len(list(run.rglob("*.ckpt"))) == 2  # the checkpoint of the last validation, and last.ckpt
    assert read_step(run / "checkpoints" / "last.ckpt") == 4
    assert fit(tmp_path, "--trainer.callbacks=null", "--resume", "--trainer.max_steps=6") == 0
    assert read_step(run / "checkpoints" / "last.ckpt") == 6


@pytest.mark.parametrize("callbacks", ["--trainer.callbacks=null", "--trainer.max_steps=4"])
def test_fast_dev_run_leaves_no_checkpoint_and_no_file_in_the_working_directory(
    callbacks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    config, runs = Path(QUICKSTART).resolve(), tmp_path / "runs"
    monkeypatch.chdir(tmp_path / "here")
    options = [callbacks, f"--runs_dir={runs}", "--trainer.fast_dev_run=true"]
    assert main(["fit", "--config", str(config), *TINY, *options]) == 0
    assert not list((tmp_path / "here").iterdir())
    assert not list(runs.rglob("*.ckpt"))
    assert "checkpoint" not in capsys.readouterr().out


def test_a_stop_by_a_metric_that_does_not_exist_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(tmp_path, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/los") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("refusion-lit: error: trainer: Early stopping conditioned on metric `val/los` which")


@pytest.mark.parametrize("command", ["test", "predict"])
@pytest.mark.parametrize("option", ["--trainer.logger=false", "--trainer.fast_dev_run=true"])
def test_without_a_logger_results_land_in_the_run_directory(
    command: str, option: str, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config, source = Path(QUICKSTART).resolve(), Path(checkpoint).resolve()
    monkeypatch.chdir(tmp_path)
    assert main([command, "--config", str(config), *TINY_TEST, f"--ckpt_path={source}", option]) == 0
    run = Path("runs", "quickstart", "version_0")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    result = {"test": run / "report" / "report.html", "predict": run / "predictions.jsonl"}[command]
    assert result.is_file()
    assert str(result) in "".join(capsys.readouterr())


def test_a_training_may_leave_no_checkpoint(tmp_path: Path) -> None:
    options = ["--trainer.callbacks=null", "--trainer.enable_checkpointing=false"]
    assert fit(tmp_path, "--run_version=v", *options) == 0
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_training_without_a_logger_leaves_its_checkpoint(tmp_path: Path) -> None:
    assert main(["fit", "--config", QUICKSTART, *TINY, "--trainer.logger=false", f"--runs_dir={tmp_path}"]) == 0
    assert (tmp_path / "quickstart" / "version_0" / "checkpoints" / "last.ckpt").is_file()


def test_a_logger_of_the_user_writes_beside_the_run_s_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(QUICKSTART).resolve()
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("a: 1\n")  # a file of another program
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.logger.version=1"]
    assert main(["fit", "--config", str(config), *TINY, *logger, "--run_version=mine"]) == 0
    assert "next: refusion-lit test --config runs/quickstart/mine/config.yaml" in capsys.readouterr().out
    for file in ("runs/quickstart/mine/checkpoints/last.ckpt", "runs/quickstart/mine/metrics.csv"):
        assert Path(file).is_file()
    [metrics] = Path("logs").rglob("metrics.csv")
    assert main(["fit", "--resume=runs/quickstart/mine", "--trainer.max_steps=6"]) == 0
    steps = [
        [row.get("step") for row in csv.DictReader(text.splitlines())]
        for text in (metrics.read_text(), Path("runs/quickstart/mine/metrics.csv").read_text())
    ]
    assert steps[0] == steps[1]
    assert {*map(str, range(6))} <= {*steps[0]}


def test_ckpt_path_last_is_the_last_checkpoint_of_the_named_version(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(runs, "--run_version=other", "--ckpt_path=last", "--trainer.max_steps=2") == 0
    assert "training starts at the beginning" in capsys.readouterr().err
    assert read_step(runs / "quickstart" / "other" / "checkpoints" / "last.ckpt") == 2


def test_a_directory_holds_one_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(runs.rglob("*"))
    assert fit(runs, "--run_version=version_0") == 2
    error = capsys.readouterr().err
    assert "run_version: expected a new run, got" in error
    assert "--resume" in error
    assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize("launcher", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_only_the_first_process_claims_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv(launcher, "1")
    assert Claim(tmp_path / "run").lock is None
    assert not (tmp_path / "run").exists()


def test_a_directory_is_written_by_one_process(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A run in another process would hold this lock.
    other = acquire_lock(runs / "quickstart" / "version_0" / ".lock", "run_version", "other run", "wait")
    before = sorted(runs.rglob("*"))
    assert fit(runs, "--resume", "--trainer.max_steps=6") == 2
    error = capsys.readouterr().err
    assert "run_version: expected no other process that writes to " in error
    assert sorted(runs.rglob("*")) == before
    release_lock(other)
    assert fit(runs, "--resume", "--trainer.max_steps=6") == 0
    assert not list(runs.rglob(".lock"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run_version=../../evil"], "run_version: expected a name inside RUNS_DIR, got '../../evil'"),
        (["--run_version=/tmp/evil"], "run_version: expected a name inside RUNS_DIR"),
        (["--run_name=../evil"], "run_name: expected a name inside RUNS_DIR"),
        (["--resume=none"], "got 'none'; give"),
        (["--trainer.strategy=ddp_spawn", "--trainer.devices=2"], "trainer.strategy: expected a strategy"),
        (["--trainer.val_check_interval=0"], "trainer.val_check_interval: expected a number of batches of at least 1"),
        (["--trainer.accumulate_grad_batches=0"], "trainer.accumulate_grad_batches: expected an integer of at least 1"),
        (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val: expected a number above 0, or null, got -1"),
        (["--trainer.max_time=00:00:00:00"], "fit: expected time and batches for a step, got 'none, and no step was"),
        (["--trainer.limit_train_batches=0"], "trainer.limit_train_batches: expected"),
        (["--trainer.max_epochs=0"], "trainer.max_epochs: expected"),
        (["--trainer.max_steps=0"], "trainer.max_steps: expected"),
        (["--data.task.num_train=-1"], "num_train"),
        (["--trainer.logger=WandbLogger"], "Requirement 'wandb"),
        (["--trainer.logger=CSVLoger"], "CSVLoger; did you mean 'CSVLogger'?"),
        (["--trainer.logger=CSVLogger"], "trainer.logger: the following arguments are required: save_dir"),
        (
            ["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"],
            "trainer.callbacks: expected callbacks with which a run can be resumed, got 'StochasticWeightAveraging'",
        ),
        (["--trainer.callbacks+=LearningRateFinder"], "got 'LearningRateFinder'; set model.optimizer.lr"),
        (["--trainer.callbacks+=BatchSizeFinder"], "got 'BatchSizeFinder'; set data.batch_size"),
        (
            ["--trainer.callbacks+=ModelPruning", "--trainer.callbacks.pruning_fn=l1_unstructured"],
            "got 'ModelPruning'; prune the weights of",
        ),
        (["--trainer.callbacks+=BackboneFinetuning"], "got 'BackboneFinetuning'; train a few weights with"),
        (["--trainer.callbacks+=EarlyStopping"], "trainer.callbacks: the following arguments are required: monitor"),
        (["--trainer.strategy=nope"], "error: trainer: You selected an invalid strategy name: `strategy='nope'`"),
        (
            ["--trainer.accelerator=cpuu"],
            "error: trainer: You selected an invalid accelerator name: `accelerator='cpuu",
        ),
        (["--trainer.devices=nope"], "error: trainer: `devices` selected with `CPUAccelerator` should be an int > 0."),
        (["--trainer.check_val_every_n_epoch=0"], "check_val_every_n_epoch: expected an integer of at least 1, got 0"),
        (["--model.optimizer=Adam", "--model.optimizer.lr=fast"], "model.optimizer.lr: expected float"),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(tmp_path / "runs", *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_without_a_result_leaves_nothing(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    # That prompts of 64 terms leave no room for 200 tokens is found only after config and events are written.
    too_long = ["--data.task.min_terms=64", "--data.task.max_terms=64", "--model.sampling.max_new_tokens=200"]
    assert main([*args, *too_long]) == 2
    assert "(a context of" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    run = tmp_path / "quickstart" / "version_0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("a: 1\n")  # existing files are never deleted
    assert main([*args, *too_long, "--run_version=version_0"]) == 2
    assert (run / "config.yaml").is_file()


@pytest.mark.parametrize(("command", "what"), [("test", "test"), ("predict", "predict"), ("validate", "val")])
def test_a_run_without_batches_is_refused(
    checkpoint: str, tmp_path: Path, command: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [command, "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main([*args, f"--trainer.limit_{what}_batches=0"]) == 2
    assert f"trainer.limit_{what}_batches: expected some batches, got 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_predictions_are_replaced_by_no_other_test(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "quickstart" / "version_0"
    test = ["test", "--config", str(run / "config.yaml"), f"--runs_dir={runs}", "--data.task.num_test=2"]
    test.append(f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
    for _ in range(2):  # the config names the training's directory, but a test gets a new one
        assert main(test) == 0
    first = runs / "quickstart" / "version_1"
    assert (first.with_name("version_2") / "results.json").is_file()
    assert not (run / "results.json").exists()
    predictions = (first / "predictions_refusion.jsonl").read_text()
    assert main([*test, "--run_version=version_1", "--data.task.num_test=3"]) == 2
    error = capsys.readouterr().err
    assert f"run_version: expected a new run, got '{first}, which holds predictions'" in error
    assert (first / "predictions_refusion.jsonl").read_text() == predictions


@pytest.mark.parametrize("command", ["test", "predict", "validate"])
def test_nothing_else_is_written_into_a_trainings_directory(
    runs: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "quickstart" / "version_0"
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    args = [command, "--config", QUICKSTART, *TINY_TEST, f"--runs_dir={runs}", "--run_version=version_0"]
    assert main([*args, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"]) == 2
    assert f"run_version: expected a new run, got '{run}, which holds checkpoints'" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("command", ["test", "predict"])
def test_a_training_is_not_resumed_by_another_command(
    runs: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other command would decode with the weights from before the training."""
    run = runs / "quickstart" / "version_0"
    assert main([command, f"--resume={run}"]) == 2
    error = capsys.readouterr().err
    assert f"resume: expected a run of {command}, got '{run}, a run of fit'" in error
    assert not (run / "results.json").exists()


def test_a_validation_is_not_resumed_as_a_test(runs: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={runs}"]
    assert main(["test", *args]) == 0
    assert main(["validate", *args]) == 0
    capsys.readouterr()
    assert main(["test", *args, "--resume"]) == 0
    assert "there is nothing left to do" in capsys.readouterr().err
    validation = runs / "quickstart" / "version_2"
    assert main(["test", f"--resume={validation}"]) == 2
    expected = f"resume: expected a run of test, got '{validation}, a run of validate'"
    assert expected in capsys.readouterr().err


def test_a_fit_goes_on_beside_predictions(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Earlier versions wrote the predictions of a test into the directory of its training."""
    run = runs / "quickstart" / "version_0"
    (run / "predictions_refusion.jsonl").write_text('{"id": "0"}\n')
    assert main(["fit", f"--resume={run}", "--trainer.max_steps=6"]) == 0
    assert read_step(run / "checkpoints" / "last.ckpt") == 6
    assert main(["validate", "--config", QUICKSTART, *TINY_TEST, f"--runs_dir={runs}", "--run_version=version_0"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "--resume" not in line, "a validation cannot be resumed"


def test_a_named_trainings_config_leads_a_test_to_a_directory_of_its_own(tmp_path: Path) -> None:
    assert fit(tmp_path, "--run_version=first") == 0
    run = tmp_path / "quickstart" / "first"
    environment = (run / "environment.json").read_text()
    test = ["test", "--config", str(run / "config.yaml"), "--data.task.num_test=2"]
    assert main([*test, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"]) == 0
    assert (tmp_path / "quickstart" / "version_0" / "results.json").is_file()
    assert (run / "environment.json").read_text() == environment


def test_a_run_that_fails_keeps_its_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(tmp_path, "--model.optimizer=SGD", "--model.optimizer.lr=1e30", "--model.schedule.warmup_steps=0") == 2
    assert "expected a finite loss and gradient" in capsys.readouterr().err
    assert (tmp_path / "quickstart" / "version_0" / "metrics.csv").is_file()


RUN_OPTIONS: dict[str, Any] = {"trainer": {}, "model": {}, "data": {}, "ckpt_path": None}
"""Options in the config of every run."""


@pytest.mark.parametrize(
    ("inside", "named"),
    [("quickstart/version_0", "."), ("quickstart", "version_0"), ("quickstart/version_0", "../version_0")],
)
def test_a_run_is_named_from_inside_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, named: str
) -> None:
    run = tmp_path / "quickstart" / "version_0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({**RUN_OPTIONS, "verbose": True}))
    monkeypatch.chdir(tmp_path / inside)
    args = expand_resume("test", [], named)
    assert args[1:4] == [f"--runs_dir={tmp_path}", "--run_name=quickstart", "--run_version=version_0"]


def test_a_folder_of_runs_is_refused_with_its_newest_run(tmp_path: Path) -> None:
    # Two trainings, and a newer test, whose config has the option "verbose".
    for time, (version, option) in enumerate([("first", "fit"), ("second", "fit"), ("tested", "verbose")]):
        run = tmp_path / "quickstart" / version
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump({**RUN_OPTIONS, option: True}))
        os.utime(run, (time, time))
    newest = tmp_path / "quickstart" / "second"
    with pytest.raises(ValueError, match=f"got {str(tmp_path / 'quickstart')!r}.*{newest}"):
        expand_resume("fit", [], str(tmp_path / "quickstart"))
    with pytest.raises(ValueError, match=r"a version in runs/default, got '.*nowhere'"):
        expand_resume("fit", [], str(tmp_path / "nowhere"))


@pytest.mark.parametrize("resume", ["--resume", "--resume=version_0"])
def test_a_name_that_is_no_text_is_refused_when_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(Path(QUICKSTART).read_text()), "run_name": 2024}))
    assert main(["fit", f"--config={config}", *TINY, f"--runs_dir={tmp_path}", resume]) == 2
    error = capsys.readouterr().err
    expected = "run_name: expected str" if resume == "--resume" else "resume: expected a run's directory"
    assert expected in error


def test_the_commands_that_are_printed_are_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "my runs" / "it's" / "version_0"
    monkeypatch.setenv("RANK", "1")  # the directory is not created
    monkeypatch.setattr(RefusionCLI, "claim", Claim(run))
    assert shlex.split(_how_to_resume("fit", ""))[-4:] == ["refusion-lit", "fit", "--resume", str(run)]


def test_validate_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--config", QUICKSTART, "--resume"]) == 2
    assert "resume: expected fit, test or predict, got 'validate'" in capsys.readouterr().err


def test_a_test_is_resumed_only_with_its_settings(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main([*args, "--trainer.enable_progress_bar=false"]) == 0
    run = tmp_path / "quickstart" / "version_0"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["resume"] is False
    capsys.readouterr()
    assert main(["test", "--resume", str(run)]) == 0
    assert "there is nothing left to do\n" in capsys.readouterr().err
    assert main(["test", "--resume", str(run), "--model.sampling.max_new_tokens=12"]) == 2
    assert "max_new_tokens was 16, is 12" in capsys.readouterr().err


def test_fit_prints_its_checkpoint_and_a_command_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path = tmp_path / "my runs"
    assert fit(tmp_path) == 0
    shown = capsys.readouterr().out
    checkpoint = tmp_path / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    assert f"checkpoint: {checkpoint}\n" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("next: ")]
    program, *command = shlex.split(line.removeprefix("next: "))
    assert program == "refusion-lit"
    assert main([*command, *TINY_TEST, f"--runs_dir={tmp_path}", "--trainer.enable_progress_bar=false"]) == 0
    assert "tokens/forward" in capsys.readouterr().out


def test_a_checkpoints_traits_are_known_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attention that the decoder needs is stored in the checkpoint, not in the config."""
    options = ["--model.objective=Masked", "--model.decoders={a: LLaDA}"]
    assert fit(tmp_path, *options) == 0
    run = tmp_path / "quickstart" / "version_0"
    capsys.readouterr()
    source = [f"--config={run / 'config.yaml'}", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"]
    for subcommand in ("test", "predict"):
        assert main([subcommand, *source, *TINY_TEST, f"--runs_dir={tmp_path}"]) == 0, capsys.readouterr().err
    monkeypatch.setattr(SlotDiffusionModule, "on_load_checkpoint", lambda *_: pytest.fail("weights are read"))
    for subcommand in ("test", "predict"):
        other = "--model.decoders={a: Autoregressive}"
        assert main([subcommand, *source, *TINY_TEST, f"--runs_dir={tmp_path}", other]) == 2
        assert "Autoregressive does not fit this model" in capsys.readouterr().err


def test_predict_prints_its_file_and_validate_its_figures(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main(["predict", *options]) == 0
    file = Path(capsys.readouterr().out.removeprefix("ReFusion: ").strip())
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 12
    assert main(["validate", *options]) == 0
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert shown.keys() >= {"val/loss", "val/ar", "val/mdm", "val/accepted_1", "val/confident", "val/agreement"}
    assert float(shown["val/loss"]) == pytest.approx(float(shown["val/ar"]) + float(shown["val/mdm"]), rel=1e-4)


def test_the_checkpoint_of_the_lowest_validation_loss_is_kept_beside_the_last(trained: Path) -> None:
    with (trained / "metrics.csv").open() as file:
        losses = {int(row["step"]) + 1: float(row["val/loss"]) for row in csv.DictReader(file) if row.get("val/loss")}
    best = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)
    assert len(losses) > 1
    assert best["global_step"] == min(losses, key=losses.__getitem__)
    (watch,) = [callback for callback in best["callbacks"].values() if callback.get("monitor") == "val/loss"]
    assert float(watch["best_model_score"]) == pytest.approx(min(losses.values()))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with a run whose config names a data file by a relative path."""
    folder = tmp_path / "project"
    folder.mkdir()
    rows = [{"query": f"{i}+1>", "response": f"{i + 1};"} for i in range(40)]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {"train": "sums.jsonl", "validation_fraction": 0.1, "test": ["sums.jsonl"]}
    overlay = {"data": {"task": {"class_path": "InstructionFiles", "init_args": task}}}
    (folder / "sums.yaml").write_text(yaml.safe_dump(overlay))
    monkeypatch.chdir(folder)
    options = [option for option in TINY if "data.task" not in option]
    args = ["fit", "--config", QUICKSTART, "--config=sums.yaml", *options, "--run_name=r", "--run_version=v"]
    assert main([*args, "--data.max_eval_prompts=2"]) == 0
    return folder


def _test(run: Path, *options: str) -> int:
    """Run ``test`` with the config and the last checkpoint of a run; return the exit code."""
    return main(["test", f"--config={run / 'config.yaml'}", f"--ckpt_path={run}", "--run_name=t", *options])


def test_a_run_finds_its_data_from_another_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    run = project / "runs" / "r" / "v"
    assert _test(run) == 0
    assert f"data.task.init_args.train: {project / 'sums.jsonl'}" in capsys.readouterr().err
    (sums,) = yaml.safe_load((run / "config.yaml").read_text())["data"]["task"]["init_args"]["test"]
    assert sums == "sums.jsonl"  # so that a project may be copied as a whole
    shutil.copytree(run, other / "copy")
    assert _test(other / "copy") == 0
    with pytest.warns(UserWarning, match=r"options that differ .*: trainer.enable_progress_bar;"):
        assert main(["fit", f"--resume={run}", "--trainer.max_steps=6", "--trainer.enable_progress_bar=true"]) == 0
    assert json.loads((run / "environment.json").read_text())["working_directory"] == str(project)


def test_a_copy_of_a_project_uses_its_own_data(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    shutil.rmtree(project)
    monkeypatch.chdir(copy)
    assert _test(Path("runs/r/v")) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert _test(copy / "runs" / "r" / "v") == 2
    assert "sums.jsonl: expected a data file" in capsys.readouterr().err
    given = f"--data.task.test={copy / 'sums.jsonl'}"
    assert _test(copy / "runs" / "r" / "v", given, f"--data.task.train={copy / 'sums.jsonl'}") == 0
