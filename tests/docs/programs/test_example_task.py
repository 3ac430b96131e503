"""The example task of the documentation is learnt in 300 steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refusion_lit.cli import main

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"


def test_the_task_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    options = [
        "--data.task=reversal.Reversal", "--data.task.num_letters=4", "--trainer.max_steps=300",
        "--trainer.val_check_interval=300", "--model.schedule.warmup_steps=20", "--num_threads=1",
    ]  # fmt: skip
    fit = ["fit", f"--config={ROOT / 'configs' / 'quickstart.yaml'}", f"--runs_dir={tmp_path}", *options]
    assert main([*fit, "--run_name=a", "--run_version=b"]) == 0
    run = tmp_path / "a" / "b"
    assert main(["test", f"--config={run / 'config.yaml'}", f"--ckpt_path={run}", "--run_version=c"]) == 0
    (figures,) = json.loads((tmp_path / "a" / "c" / "results.json").read_text())["results"].values()
    assert figures["score"] >= 0.9
