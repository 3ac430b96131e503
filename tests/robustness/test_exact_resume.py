"""A training that is killed at any moment and resumed ends bit for bit like a training that was not killed.

Signals and full disks end a training with one line, and leave checkpoints to resume from.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import random
import re
import resource
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from tensorboard.summary.writer.record_writer import RecordWriter

from cli.conftest import QUICKSTART
from refusion_lit.checkpoints.files import newest_checkpoint
from refusion_lit.cli import main
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.training.resume import count_finished_epochs
from support.forks import act_at_call, start, wait

NUM_STEPS = 40
CONSTANT_RATE = ["--model.schedule.final_lr_ratio=1"]
"""Else the learning rate of a step would depend on the number of the last step."""
AT_EPOCH_ENDS = ["--trainer.check_val_every_n_epoch=1", "--trainer.val_check_interval=1.0"]


@dataclass
class Unbroken:
    """A training that was not interrupted.

    Attributes:
        losses: The logged losses by step, as texts.
        state: The last checkpoint.
    """

    losses: dict[int, str]
    state: dict[str, Any]


def _losses(run: Path) -> dict[int, str]:
    """Return the losses by step, as texts, of all versions of a run; a step that ran twice must have one loss."""
    losses: dict[int, str] = {}
    for path in sorted(run.glob("version_*/metrics*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                if row.get("train/loss"):
                    assert losses.setdefault(int(row["step"]), row["train/loss"]) == row["train/loss"]
    return losses


def _checkpoints(run: Path) -> list[Path]:
    return sorted(run.glob("version_*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def _state(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def _assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            _assert_equal(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        for actual_item, expected_item in zip(actual, expected, strict=True):
            _assert_equal(actual_item, expected_item)
    else:
        assert actual == expected


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, fit_args: list[str]) -> Unbroken:
    folder = tmp_path_factory.mktemp("unbroken")
    assert main([*fit_args, f"--runs_dir={folder}"]) == 0  # here, so that the processes find everything imported
    run = folder / "quickstart"
    return Unbroken(_losses(run), _state(run / "version_0" / "checkpoints" / "last.ckpt"))


def _assert_like_unbroken(run: Path, unbroken: Unbroken) -> None:
    """Assert that an interrupted run has the losses and the last checkpoint of the unbroken run."""
    actual = _losses(run)
    assert len(unbroken.losses) == NUM_STEPS
    assert actual.items() <= unbroken.losses.items()
    assert max(actual) == max(unbroken.losses)
    last = _state(_checkpoints(run)[-1])
    for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        _assert_equal(last[key], unbroken.state[key])


def _write_callbacks(path: Path, *callbacks: tuple[str, str], trainer: str = "") -> Path:
    """Write a config with callbacks of Lightning, each given by its class and its options; return its path."""
    entries = [f"{{class_path: lightning.pytorch.callbacks.{name}, init_args: {{{args}}}}}" for name, args in callbacks]
    path.write_text(f"trainer: {{{trainer}callbacks: [{', '.join(entries)}]}}")
    return path


def _die_while_writing(number: int) -> None:
    """Let the process kill itself when half of its checkpoint number ``number`` is written."""

    def die(values: Any, file: Any) -> None:
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    act_at_call(torch, "save", number, die, is_after=True)


def test_killed_at_random_moments_and_while_writing(tmp_path: Path, fit_args: list[str], unbroken: Unbroken) -> None:
    """Six times a process resumes the training and is killed: twice while it writes a checkpoint."""
    draw = random.Random(0)
    args = [*fit_args, f"--runs_dir={tmp_path}", "--ckpt_path=last"]
    run = tmp_path / "quickstart"
    num_kills = 0
    for attempt in range(6):
        if attempt in (1, 4):
            process = start(args, tmp_path / "log", lambda: _die_while_writing(draw.randint(1, 4)))
        else:
            process = start(args, tmp_path / "log")
            metrics = run / f"version_{attempt}" / "metrics.csv"
            while process.is_alive() and not metrics.is_file():
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.15))
            process.kill()
        num_kills += wait(process) == -signal.SIGKILL
        for path in _checkpoints(run):
            _state(path)  # all checkpoints can be read: none is half written
    assert num_kills >= 4  # a process may end before it is killed, or write too few checkpoints to die
    assert wait(start(args, tmp_path / "log")) == 0
    _assert_like_unbroken(run, unbroken)


def test_the_last_step_is_saved_with_any_intervals(tmp_path: Path, fit_args: list[str]) -> None:
    """A training of 10, then 17, then 20 steps ends with the state of a training of 20 steps."""
    args = [*fit_args, *CONSTANT_RATE]
    for num_steps in (10, 17, 20):  # checkpoints are saved every third step
        assert main([*args, f"--runs_dir={tmp_path}", f"--trainer.max_steps={num_steps}", "--ckpt_path=last"]) == 0
        resumed = _state(_checkpoints(tmp_path / "quickstart")[-1])
        assert resumed["global_step"] == num_steps
    assert main([*args, f"--runs_dir={tmp_path / 'unbroken'}", "--trainer.max_steps=20"]) == 0
    unbroken = _state(tmp_path / "unbroken" / "quickstart" / "version_0" / "checkpoints" / "last.ckpt")
    for key in ("global_step", "state_dict", "optimizer_states"):
        _assert_equal(resumed[key], unbroken[key])


def test_a_run_may_be_stopped_at_the_end_of_an_epoch_and_within(tmp_path: Path, fit_args: list[str]) -> None:
    """Stopped and resumed four times, four epochs end with the state and the metrics of an unbroken run."""
    args = [*fit_args, "--trainer.max_epochs=4", "--data.task.num_train=48", f"--runs_dir={tmp_path}", *CONSTANT_RATE]
    assert main([*args, "--run_version=unbroken", "--trainer.max_steps=-1"]) == 0
    run = tmp_path / "quickstart"
    unbroken = _state(run / "unbroken" / "checkpoints" / "last.ckpt")
    per_epoch = unbroken["global_step"] // 4
    stops = (per_epoch, 2 * per_epoch, 2 * per_epoch + 1, 3 * per_epoch, -1)  # -1: at the end of the last epoch
    for index, num_steps in enumerate(stops):
        command = [*args, "--run_version=stopped"] if index == 0 else ["fit", f"--resume={run / 'stopped'}"]
        assert main([*command, f"--trainer.max_steps={num_steps}"]) == 0
    resumed = _state(run / "stopped" / "checkpoints" / "last.ckpt")
    for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        _assert_equal(resumed[key], unbroken[key])
    assert _rows(run / "stopped") == _rows(run / "unbroken")


def test_the_last_step_is_validated_and_a_longer_run_forgets_that_validation(
    tmp_path: Path, fit_args: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A run of 6 steps, resumed to 17, has the metrics, checkpoints and early stopping of a run of 17 steps."""
    config = _write_callbacks(
        tmp_path / "stopping.yaml",
        ("EarlyStopping", "monitor: val/loss, patience: 3, mode: max"),
        ("ModelCheckpoint", "monitor: val/loss, mode: min, filename: best, save_last: true"),
    )
    args = [*fit_args, f"--config={config}", "--trainer.val_check_interval=8", f"--runs_dir={tmp_path}", *CONSTANT_RATE]
    assert main([*args, "--run_version=unbroken", "--trainer.max_steps=17"]) == 0
    # The first run ends after 12 batches, so that its last validation lies between the validations after 8 and 16.
    first_run = [*args, "--run_version=longer", "--trainer.max_steps=6", "--trainer.enable_progress_bar=true"]
    assert main(first_run) == 0
    assert re.search(r"trained to step 6 .*val/loss [\d.]+$", capfd.readouterr().err, re.MULTILINE)
    run = tmp_path / "quickstart" / "longer"
    assert _rows(run)[-1] == ("5", True)
    best = _state(run / "checkpoints" / "best.ckpt")
    assert best["global_step"] == 6
    assert main(["fit", f"--resume={run}", "--trainer.max_steps=17"]) == 0
    assert _rows(run) == _rows(tmp_path / "quickstart" / "unbroken")
    longer, unbroken = (_state(path / "checkpoints" / "last.ckpt") for path in (run, run.with_name("unbroken")))
    for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        _assert_equal(longer[key], unbroken[key])
    stopping = next(key for key in unbroken["callbacks"] if key.startswith("EarlyStopping"))
    assert longer["callbacks"][stopping]["wait_count"] == unbroken["callbacks"][stopping]["wait_count"]


def _signal_in_step(number: signal.Signals, step: int) -> None:
    """Let the process send itself a signal at the beginning of a step."""
    start_of_batch = SlotDiffusionModule.on_train_batch_start

    def send_and_start(self: SlotDiffusionModule, *args: Any) -> None:
        if self.global_step == step:
            os.kill(os.getpid(), number)
        start_of_batch(self, *args)

    SlotDiffusionModule.on_train_batch_start = send_and_start


def test_the_validation_after_max_time_does_not_count_for_early_stopping(
    tmp_path: Path, fit_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over in step 9, which adds a validation to the validations after 8 and 16 steps.

    Early stopping ends the training at the second validation without improvement, so it would stop too early if the
    added validation counted.
    """
    config = _write_callbacks(
        tmp_path / "stopping.yaml",
        ("EarlyStopping", "monitor: val/loss, patience: 2, min_delta: 100"),
        ("ModelCheckpoint", "save_last: true"),
        trainer="max_time: '00:01:00:00', ",  # days:hours:minutes:seconds
    )
    args = [*fit_args, f"--config={config}", "--trainer.val_check_interval=8", f"--runs_dir={tmp_path}"]
    args += ["--trainer.accumulate_grad_batches=1"]
    run = tmp_path / "quickstart" / "stopped"
    assert main([*args, "--run_version=unbroken"]) == 0
    hours = 0
    start_of_batch = SlotDiffusionModule.on_train_batch_start

    def expire_and_start(self: SlotDiffusionModule, *args: Any) -> None:
        nonlocal hours
        if self.global_step == 9:
            hours = 2
        start_of_batch(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Timer, "time_elapsed", lambda *_: 3600.0 * hours)
        patched.setattr(SlotDiffusionModule, "on_train_batch_start", expire_and_start)
        assert main([*args, "--run_version=stopped"]) == 0
    assert _rows(run)[-1] == ("9", True)
    assert main(["fit", f"--resume={run}", "--trainer.max_time=00:10:00:00"]) == 0
    assert _rows(run) == _rows(run.with_name("unbroken"))


@pytest.mark.parametrize("validates", ["at intervals", "at the ends of epochs"])
def test_a_stop_beside_a_validation_counts_the_validation_once(
    tmp_path: Path, fit_args: list[str], validates: str
) -> None:
    """Validations follow every second step. A signal ends the training in step 3, another one kills it in step 7."""
    config = _write_callbacks(
        tmp_path / "stopping.yaml",
        ("ModelCheckpoint", "save_last: true, every_n_train_steps: 2"),
        ("EarlyStopping", "monitor: val/loss, patience: 4, mode: max"),
        ("ModelCheckpoint", "monitor: val/loss, mode: max, filename: best"),
    )
    args = [*fit_args, f"--config={config}", "--trainer.accumulate_grad_batches=1", f"--runs_dir={tmp_path}"]
    if validates == "at intervals":
        args += ["--trainer.val_check_interval=2"]
    else:
        args += [*AT_EPOCH_ENDS, "--data.task.num_train=16"]  # two batches in an epoch
    assert main([*args, "--run_version=unbroken"]) == 0
    run = tmp_path / "quickstart" / "stopped"
    terminate, kill = partial(_signal_in_step, signal.SIGTERM, 3), partial(_signal_in_step, signal.SIGKILL, 7)
    assert wait(start([*args, "--run_version=stopped"], tmp_path / "log", terminate)) == 128 + signal.SIGTERM
    assert wait(start(["fit", f"--resume={run}"], tmp_path / "log", kill)) == -signal.SIGKILL
    assert main(["fit", f"--resume={run}"]) == 0
    assert _rows(run) == _rows(run.with_name("unbroken"))
    for name in ("best", "last"):
        stopped, unbroken = (_state(path / "checkpoints" / f"{name}.ckpt") for path in (run, run.with_name("unbroken")))
        for key in ("global_step", "state_dict", "optimizer_states"):
            _assert_equal(stopped[key], unbroken[key])


# Ten steps of two batches: the interval of 20 batches ends with the last step, which is step 9 counted from 0.
@pytest.mark.parametrize(
    ("option", "validations"),
    [("--trainer.limit_val_batches=0", []), ("--trainer.val_check_interval=20", ["9"])],
)
def test_no_validation_is_added_without_validations_or_beside_a_validation(
    tmp_path: Path, fit_args: list[str], option: str, validations: list[str]
) -> None:
    assert main([*fit_args, option, f"--runs_dir={tmp_path}", "--trainer.max_steps=10"]) == 0
    run = tmp_path / "quickstart" / "version_0"
    assert [step for step, is_validation in _rows(run) if is_validation] == validations
    assert _state(run / "checkpoints" / "last.ckpt")["global_step"] == 10


EVERY_SECOND = ["--trainer.check_val_every_n_epoch=1", "--trainer.val_check_interval=2"]


@pytest.mark.parametrize(
    ("save", "length", "num_steps"),
    [
        pytest.param(
            "save_top_k: 0, every_n_train_steps: 100",
            ["--trainer.max_epochs=1", "--trainer.max_steps=-1"],
            None,
            id="in the last epoch",
        ),
        pytest.param(
            "save_top_k: 0, every_n_train_steps: 0, every_n_epochs: 1",
            ["--trainer.max_steps=5"],
            5,
            id="between validations",
        ),
        pytest.param(
            "every_n_train_steps: 0, every_n_epochs: 1",
            ["--trainer.max_steps=5", *AT_EPOCH_ENDS],
            5,
            id="at the end of an epoch",
        ),
        pytest.param(
            "every_n_train_steps: 2, monitor: val/loss, mode: max",
            ["--trainer.max_steps=6", *EVERY_SECOND],
            6,
            id="with a validation that is not best",
        ),
    ],
)
def test_the_last_step_is_saved_where_nothing_else_would_be(
    tmp_path: Path, fit_args: list[str], save: str, length: list[str], num_steps: int | None
) -> None:
    config = _write_callbacks(tmp_path / "rarely.yaml", ("ModelCheckpoint", f"save_last: true, {save}"))
    assert main([*fit_args, f"--config={config}", *length, f"--runs_dir={tmp_path}"]) == 0
    run = tmp_path / "quickstart"
    path = run / "version_0" / "checkpoints" / "last.ckpt"
    assert newest_checkpoint([run]) == path
    last = _state(path)
    assert last["global_step"] == (num_steps or max(_losses(run)) + 1)
    # An epoch has 96 samples, or 12 batches of 8, or 6 steps of two batches.
    assert count_finished_epochs(last["loops"]["fit_loop"]) == last["global_step"] // 6


def test_the_last_step_is_saved_where_validations_do_not_reach(tmp_path: Path, fit_args: list[str]) -> None:
    options = ["--trainer.callbacks=null", "--trainer.max_steps=-1", "--trainer.max_epochs=3"]
    intervals = ["--trainer.check_val_every_n_epoch=2", "--trainer.val_check_interval=1.0"]
    assert main([*fit_args, *options, *intervals, f"--runs_dir={tmp_path}"]) == 0
    run = tmp_path / "quickstart"
    assert _state(run / "version_0" / "checkpoints" / "last.ckpt")["global_step"] == max(_losses(run)) + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_and_ends_a_training_that_resumes(
    tmp_path: Path, fit_args: list[str], unbroken: Unbroken, number: signal.Signals
) -> None:
    args = [*fit_args, f"--runs_dir={tmp_path}", "--run_version=v", "--ckpt_path=last"]
    run = tmp_path / "quickstart"
    process = start(args, tmp_path / "log")
    while process.is_alive() and not (run / "v" / "metrics.csv").is_file():
        time.sleep(0.005)
    os.kill(process.pid or 0, number)
    assert wait(process) == 128 + number
    output = (tmp_path / "log").read_text()
    assert f"refusion-lit: error: stopped by {number.name} after step" in output
    assert f"resume with: refusion-lit fit --resume {run / 'v'}\n" in output
    assert "Traceback" not in output
    saved = run / "v" / "checkpoints" / "last.ckpt"
    assert 0 < _state(saved)["global_step"] < NUM_STEPS
    if number == signal.SIGINT:  # both signals have one handler, so resuming is tested after one of them
        return
    assert wait(start(args, tmp_path / "log")) == 0
    (run / "v").rename(run / "version_0")
    _assert_like_unbroken(run, unbroken)
    assert [path.name for path in run.glob("version_0/metrics*.csv")] == ["metrics.csv"]
    assert len(_losses(run)) == NUM_STEPS


@pytest.mark.parametrize("ends", ["max_steps", "early stopping", "early stopping after epochs"])
def test_a_signal_in_the_step_that_ends_training_ends_it_as_usual(
    tmp_path: Path, fit_args: list[str], ends: str
) -> None:
    """All three trainings end with step 6. Early stopping ends two of them at their second validation."""
    args = [*fit_args, "--trainer.accumulate_grad_batches=1", f"--runs_dir={tmp_path}"]
    if ends == "max_steps":
        args += ["--trainer.max_steps=6"]
    else:
        early_stopping = ("EarlyStopping", "monitor: val/loss, patience: 1, min_delta: 100")
        path = _write_callbacks(tmp_path / "stopping.yaml", early_stopping, ("ModelCheckpoint", "save_last: true"))
        args += [f"--config={path}"]
        if ends == "early stopping":
            args += ["--trainer.val_check_interval=3"]
        else:
            args += [*AT_EPOCH_ENDS, "--data.task.num_train=24"]  # three batches in an epoch
    assert main([*args, "--run_version=unbroken"]) == 0
    run = tmp_path / "quickstart"
    terminate = partial(_signal_in_step, signal.SIGTERM, 5)
    assert wait(start([*args, "--run_version=signalled"], tmp_path / "log", terminate)) == 0
    assert "finishing the step" in (tmp_path / "log").read_text()
    assert _rows(run / "signalled") == _rows(run / "unbroken")
    for name in ("signalled", "unbroken"):
        assert _state(run / name / "checkpoints" / "last.ckpt")["global_step"] == 6


def test_the_printed_command_to_resume_has_the_options_of_the_resumed_run(tmp_path: Path, fit_args: list[str]) -> None:
    """The run's config says 2 steps, so that the command must name the 9 steps of the interrupted resumption."""

    def interrupt_first_batch() -> None:
        act_at_call(SlotDiffusionModule, "on_train_batch_start", 1, lambda *_: os.kill(os.getpid(), signal.SIGINT))

    assert main([*fit_args, f"--runs_dir={tmp_path}", "--run_version=v", "--trainer.max_steps=2"]) == 0
    run = tmp_path / "quickstart" / "v"
    args = ["fit", f"--resume={run}", "--trainer.max_steps=9"]
    assert wait(start(args, tmp_path / "log", interrupt_first_batch)) == 128 + signal.SIGINT
    output = (tmp_path / "log").read_text()
    assert output.index("again to stop at once") < output.index("stopped by SIGINT after step 3; saved")
    assert f"resume with: refusion-lit fit --resume {run} --trainer.max_steps=9\n" in output


def _rows(run: Path) -> list[tuple[str, bool]]:
    """Return, for each row of a run's metrics, the step and whether the row is of a validation."""
    with (run / "metrics.csv").open() as file:
        return [(row["step"], bool(row.get("val/loss"))) for row in csv.DictReader(file)]


def test_a_killed_and_resumed_training_has_one_curve_without_repetitions(tmp_path: Path, fit_args: list[str]) -> None:
    """The process dies in step 8; the newest checkpoint is of step 6, so that steps 6 and 7 run twice."""
    args = [*fit_args, f"--runs_dir={tmp_path}", "--run_version=v", "--trainer.max_steps=12"]
    kill = partial(_signal_in_step, signal.SIGKILL, 8)
    assert wait(start(args, tmp_path / "log", kill)) == -signal.SIGKILL
    run = tmp_path / "quickstart" / "v"
    assert _rows(run)[-1][0] == "7"
    command = json.loads((run / "environment.json").read_text())["command"]
    assert main(["fit", f"--resume={run}"]) == 0
    actual = _rows(run)
    assert len(set(actual)) == len(actual)
    assert [step for step, validates in actual if not validates] == [str(step) for step in range(12)]
    assert [path.name for path in run.glob("metrics*")] == ["metrics.csv"]
    assert json.loads((run / "environment.json").read_text())["command"] == command


@pytest.mark.parametrize("end", ["--trainer.max_steps=6", "--trainer.max_epochs=1"])
def test_resuming_a_complete_training_changes_nothing(
    tmp_path: Path, fit_args: list[str], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [] if "steps" in end else ["--trainer.max_steps=-1"]
    assert main([*fit_args, f"--runs_dir={tmp_path}", "--run_version=v", *steps, end]) == 0
    run = tmp_path / "quickstart" / "v"
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["fit", f"--resume={run}"]) == 0
    output = capsys.readouterr()
    (line,) = (output.out + output.err).splitlines()
    assert re.fullmatch(rf"{run} is complete: \d+ of \d+ (steps|epochs); raise trainer\.max_\w+ to train longer", line)
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("writer", "method", "num_writes", "file"),
    [
        pytest.param(RecordWriter, "write", 0, "events.out.tfevents.*", id="first event of TensorBoard"),
        pytest.param(RecordWriter, "write", 4, "events.out.tfevents.*", id="fifth event of TensorBoard"),
        pytest.param(csv.DictWriter, "writerows", 4, "metrics.csv", id="fifth write of metrics"),
    ],
)
def test_a_full_disk_ends_a_logger_with_one_line_that_names_the_file(
    tmp_path: Path, fit_args: list[str], writer: type, method: str, num_writes: int, file: str
) -> None:
    """The disk is full after ``num_writes`` writes; TensorBoard writes in a thread of its own."""
    args = [*fit_args, f"--runs_dir={tmp_path}", "--run_version=v"]
    assert wait(start(args, tmp_path / "log", partial(_fill_disk, writer, method, num_writes))) == 2
    output = (tmp_path / "log").read_text()
    assert f"refusion-lit: error: {tmp_path}/quickstart/v/{file}: No space left on device\n" in output
    assert output.count("No space left on device") == 1
    assert "Traceback" not in output


def _fill_disk(writer: type, method: str, num_writes: int) -> None:
    """Let a method of a writer fail, as on a full disk, from the write after ``num_writes`` on."""
    write, num_calls = getattr(writer, method), 0

    def write_until_full(self: Any, *args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args)

    setattr(writer, method, write_until_full)


def test_slurms_signal_saves_a_checkpoint_and_requeues_the_job(tmp_path: Path, fit_args: list[str]) -> None:
    """A fake ``scontrol`` records the request to queue the job again."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/arguments\n")
    scontrol.chmod(0o755)

    def enter_job() -> None:
        job = {"JOB_ID": "7", "JOB_NAME": "x", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
        os.environ.update({f"SLURM_{name}": value for name, value in job.items()})
        os.environ["PATH"] = f"{scontrol.parent}:{os.environ['PATH']}"
        os.chdir(tmp_path)

    process = start([*fit_args, f"--runs_dir={tmp_path}", "--run_version=v"], tmp_path / "log", enter_job)
    run = tmp_path / "quickstart" / "v"
    while process.is_alive() and not (run / "metrics.csv").is_file():
        time.sleep(0.005)
    os.kill(process.pid or 0, signal.SIGUSR1)
    assert wait(process) == 128 + signal.SIGUSR1
    assert "job 7 is requeued" in (tmp_path / "log").read_text()
    assert (tmp_path / "arguments").read_text() == "requeue 7\n"
    assert 0 < _state(run / "checkpoints" / "last.ckpt")["global_step"] < NUM_STEPS
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_full_disk_ends_the_training_and_leaves_earlier_checkpoints_to_resume_from(
    tmp_path: Path, fit_args: list[str], unbroken: Unbroken
) -> None:
    """A checkpoint is written twice, by its step and as the last one, so the third write is the second checkpoint's.

    A limit on the size of files stands for the full disk.
    """

    def limit_files(*_: Any) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # bytes; a checkpoint has more

    args = [*fit_args, f"--runs_dir={tmp_path}"]
    fill_up = partial(act_at_call, torch, "save", 3, limit_files)
    assert wait(start(args, tmp_path / "log", fill_up)) == 2
    output = (tmp_path / "log").read_text()
    assert output.count("refusion-lit: error:") == 1
    assert "cannot be written (File too large)" in output
    assert "earlier checkpoints are as they were" in output
    folder = tmp_path / "quickstart" / "version_0" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"epoch=0-step=3.ckpt", "last.ckpt"}
    assert all(_state(path)["global_step"] == 3 for path in folder.iterdir())
    assert str(folder) in output
    assert main(["fit", f"--resume={folder.parent}"]) == 0
    _assert_like_unbroken(folder.parents[1], unbroken)


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, fit_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*fit_args, f"--runs_dir={tmp_path / 'file'}"]) == 2
    assert "runs_dir: expected a directory that can be written" in capsys.readouterr().err


def test_the_last_checkpoint_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--config", QUICKSTART, f"--runs_dir={tmp_path}", "--ckpt_path=last"]) == 2
    assert "expected a checkpoint for 'last'" in capsys.readouterr().err
