"""A training that diverges stops before its weights are spoilt, and says where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cli.conftest import QUICKSTART, TINY
from refusion_lit.cli import main

OPTIONS = ["fit", "--config", QUICKSTART, *TINY, "--model.optimizer=SGD", "--model.schedule.warmup_steps=1",
           "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=9"]  # fmt: skip


def fit(runs: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main([*OPTIONS, f"--runs_dir={runs}", *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    return line


def test_the_step_its_samples_and_the_last_checkpoint_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_last": True}}
    line = fit(tmp_path, capsys, "--model.optimizer.lr=1e34", f"--trainer.callbacks=[{save}]")
    actual = re.search(
        r"got .*(nan|inf).* at step (\d+) \(samples (.*) and 12 more\)\. The last checkpoint is (\S+)\.", line
    )
    assert actual is not None, line
    assert len(re.findall(r"train-\d+", actual[3])) == 4  # of two micro-batches of eight samples
    stored = torch.load(actual[4], weights_only=True)
    assert stored["global_step"] == int(actual[2]) - 1 > 0
    assert all(bool(value.isfinite().all()) for value in stored["state_dict"].values())


def test_without_a_checkpoint_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fit(tmp_path, capsys, "--model.optimizer.lr=1e34", "--trainer.val_check_interval=8")
    assert "The last checkpoint is none." in line
