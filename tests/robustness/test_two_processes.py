"""Commands on two processes have the figures and files of one process, and the processes stop or fail together."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from cli.conftest import QUICKSTART, REPOSITORY
from refusion_lit.cli import main, trainer
from refusion_lit.data.evaluation import EvaluationBatches
from refusion_lit.training.module import SlotDiffusionModule
from robustness.conftest import torchrun
from support.forks import start, wait

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
OPTIONS = [
    "--config", QUICKSTART, "--trainer.enable_progress_bar=false", "--model.sampling.max_new_tokens=24",
    "--model.decoders.refusion.num_serial_blocks=1", "--model.decoders.other=Autoregressive",
    "--model.decoding.allow_mismatch=true", "--data.task.num_train=16", "--data.eval_batch_size=2", "--num_threads=1",
]  # fmt: skip
TWO = ["--trainer.devices=2", "--trainer.strategy=ddp_fork"]


@given(num_samples=st.integers(0, 40), batch_size=st.integers(1, 5), num_ranks=st.integers(1, 5))
@example(num_samples=1, batch_size=1, num_ranks=2)
@example(num_samples=5, batch_size=2, num_ranks=2)
def test_every_sample_once_in_order_and_equally_many_batches(num_samples: int, batch_size: int, num_ranks: int) -> None:
    ranks = [EvaluationBatches(num_samples, batch_size, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert [i for rank in ranks for batch in rank for i in batch] == list(range(num_samples))
    assert {len(list(rank)) for rank in ranks} == {len(ranks[0])}
    sizes = [len(batch) for rank in ranks for batch in rank]
    # Equally many batches for every process may need a batch with a sample more.
    assert max(sizes) <= (batch_size if num_ranks == 1 else batch_size + 1)
    if num_samples >= num_ranks:
        assert min(sizes) >= 1
    if num_ranks == 1 and num_samples:
        num_whole, rest = divmod(num_samples, batch_size)
        assert sizes == [batch_size] * num_whole + ([rest] if rest else [])


def _run(folder: Path, command: str, num: int, *options: str) -> Path:
    args = [command, *OPTIONS, f"--data.task.num_test={num}", f"--data.task.num_validation={num}"]
    version = "-".join([command, str(num), *(["two"] if TWO[0] in options else [])])
    args += [f"--ckpt_path={MODEL}", f"--runs_dir={folder}", "--run_name=r", f"--run_version={version}", *options]
    assert main(args) == 0
    return folder / "r" / version


def _by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Return predictions without their times, by id, because several processes write them in any order."""
    return {line["id"]: {key: v for key, v in line.items() if key != "seconds"} for line in _lines(path)}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("num", [1, 5])
def test_test_scores_each_sample_once_as_one_process_does(tmp_path: Path, num: int) -> None:
    alone, both = _run(tmp_path, "test", num), _run(tmp_path, "test", num, *TWO)
    assert {path.name for path in both.iterdir() if "tfevents" not in path.name} == {
        "config.yaml", "environment.json", "metrics.csv", "report", "results.json",
        "predictions_other.jsonl", "predictions_refusion.jsonl", "predictions_other.jsonl.meta.json",
        "predictions_refusion.jsonl.meta.json",
    }  # fmt: skip
    results = [json.loads((run / "results.json").read_text())["results"] for run in (alone, both)]
    for decoder in ("refusion", "other"):
        name = f"predictions_{decoder}.jsonl"
        assert _by_id(both / name) == _by_id(alone / name)
        assert len(_lines(both / name)) == num
        one, two = (values[decoder] for values in results)
        # Two processes split the prompts into other batches, and the prompts of a batch share calls and the cache.
        batch_figures = {"num_calls", "tokens_per_call", "num_batches", "calls_per_batch"}
        batch_figures |= {"peak_cache_bytes", "cache_bytes_per_token"}
        time_figures = {"seconds", "tokens_per_second", "latency_median", "latency_p95"}
        for figure in one.keys() - batch_figures - time_figures:
            assert two[figure] == pytest.approx(one[figure], rel=1e-12), figure
        assert two["num_prompts"] == num
        assert decoder == "other" or num == 1 or two["score"] > 0


def test_predict_writes_one_file(tmp_path: Path) -> None:
    alone, both = (_run(tmp_path, "predict", 3, *options) for options in ([], TWO))
    assert _by_id(both / "predictions.jsonl") == _by_id(alone / "predictions.jsonl")
    assert len(_lines(both / "predictions.jsonl")) == 3


@pytest.mark.parametrize("num", [1, 5])
def test_validation_gives_the_loss_of_one_process(tmp_path: Path, num: int) -> None:
    losses = []
    for options in ([], TWO):
        with (_run(tmp_path, "validate", num, *options) / "metrics.csv").open() as file:
            (row,) = csv.DictReader(file)
        losses.append({key: float(value) for key, value in row.items() if key.startswith("val/")})
    draft_figures = {"val/accepted_1", "val/confident", "val/agreement"}
    assert losses[0].keys() >= {"val/loss", "val/ar", "val/mdm"}
    has_masks = num > 1  # the first sample happens to have no mask
    assert (losses[0].keys() >= draft_figures) == (losses[0]["val/mdm"] > 0) == has_masks
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_complete_test_is_resumed_without_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, "test", 2, *TWO)
    _run(tmp_path, "test", 2, *TWO, "--resume")
    assert "nothing left to do\n" in capfd.readouterr().err


def test_two_processes_resume_the_test_of_one(tmp_path: Path) -> None:
    """A decoder's predictions are lost, although the meta file beside them counts all: only it decodes again."""
    run = _run(tmp_path, "test", 5)
    name = "predictions_refusion.jsonl"
    before = _by_id(run / name)
    results = json.loads((run / "results.json").read_text())["results"]
    meta = json.loads((run / f"{name}.meta.json").read_text())
    assert meta["progress"]["num_lines"] == 5
    (run / name).unlink()
    assert main(["test", f"--resume={run}", *TWO]) == 0
    assert _by_id(run / name) == before
    again = json.loads((run / "results.json").read_text())["results"]
    assert again["other"] == results["other"]
    for figure in ("score", "num_prompts", "num_forwards", "tokens_per_forward"):
        assert again["refusion"][figure] == results["refusion"][figure]


def test_a_training_in_forked_processes_names_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--model.backbone.config.hidden_size=16", "--model.backbone.config.num_hidden_layers=1"]
    data = ["--data.task.num_validation=4", "--data.task.num_train=16", "--data.batch_size=4"]
    options = [*OPTIONS, *small, *data, "--trainer.max_steps=1", f"--runs_dir={tmp_path}", "--run_version=v"]
    assert main(["fit", *options, *TWO]) == 0
    run = tmp_path / "quickstart" / "v"
    lines = capsys.readouterr().out.splitlines()
    assert f"checkpoint: {run / 'checkpoints' / 'last.ckpt'}" in lines
    assert any(str(run / "config.yaml") in line for line in lines if line.startswith("next: "))


def test_a_signal_to_a_forked_process_stops_all_and_training_resumes(tmp_path: Path) -> None:
    def signal_second_process() -> None:
        start_of_batch = SlotDiffusionModule.on_train_batch_start

        def signal_and_start(self: SlotDiffusionModule, *args: Any) -> None:
            if self.global_step == 1 and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            start_of_batch(self, *args)

        SlotDiffusionModule.on_train_batch_start = signal_and_start

    small = ["--model.backbone.config.hidden_size=16", "--model.backbone.config.num_hidden_layers=1"]
    data = ["--data.task.num_validation=4", "--data.task.num_train=16", "--data.batch_size=4"]
    args = ["fit", *OPTIONS, *small, *data, "--trainer.max_steps=4", f"--runs_dir={tmp_path}", *TWO]
    run = tmp_path / "quickstart" / "stopped"
    stopped = start([*args, "--run_version=stopped"], tmp_path / "log", signal_second_process)
    assert wait(stopped) == 128 + signal.SIGTERM
    assert f"fit --resume {run}" in (tmp_path / "log").read_text()
    path = run / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 2
    assert wait(start(["fit", f"--resume={run}"], tmp_path / "log")) == 0
    assert wait(start([*args, "--run_version=unbroken"], tmp_path / "log")) == 0
    resumed, unbroken = (
        torch.load(tmp_path / "quickstart" / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("stopped", "unbroken")
    )
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_failing_process_ends_all_with_its_error(
    kind: type[Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = SlotDiffusionModule.test_step

    def fail(self: SlotDiffusionModule, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and batch_idx == 1:
            raise kind("data: the second process cannot continue")
        step(self, batch, batch_idx)

    monkeypatch.setattr(SlotDiffusionModule, "test_step", fail)
    if kind is ValueError:  # the class of errors for users
        with pytest.raises(AssertionError):
            _run(tmp_path, "test", 6, *TWO)
        assert "refusion-lit: error: data: the second process cannot continue\n" in capsys.readouterr().err
    else:
        with pytest.raises(ProcessRaisedException, match="the second process cannot continue"):
            _run(tmp_path, "test", 6, *TWO)


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [(-signal.SIGKILL, "SIGKILL"), (128 + signal.SIGTERM, "SIGTERM"), (255, "no result")],
)
def test_the_end_of_a_forked_process_is_one_line(
    exit_code: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit code above 128 names its signal, if it is the code of a signal."""

    def end(*_: Any) -> None:
        raise ProcessExitedException("no result", error_index=0, error_pid=1, exit_code=exit_code)

    monkeypatch.setattr(trainer, "RefusionCLI", end)
    assert trainer.run("fit", []) == (exit_code if exit_code > 0 else 128 - exit_code)
    assert reason in capsys.readouterr().err


def test_torchrun_gives_the_figures_of_one_process(tmp_path: Path) -> None:
    alone = _run(tmp_path, "validate", 5)
    options = [*OPTIONS, "--data.task.num_validation=5", "--data.task.num_test=5", f"--ckpt_path={MODEL}"]
    options += [f"--runs_dir={tmp_path}", "--run_name=r", "--run_version=torchrun"]
    torchrun("validate", *options, "--trainer.devices=2", "--trainer.strategy=ddp")
    losses = []
    for run in (alone, tmp_path / "r" / "torchrun"):
        with (run / "metrics.csv").open() as file:
            (row,) = csv.DictReader(file)
        losses.append({key: float(value) for key, value in row.items() if key.startswith("val/")})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
