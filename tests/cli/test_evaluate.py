"""``refusion-lit evaluate`` without the harness; with it, see tests/evaluation."""

from __future__ import annotations

import sys

import pytest

from refusion_lit.cli import main


def test_the_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["evaluate", "--ckpt_path=nowhere", '--tasks=["gsm8k"]']) == 2
    assert "needs the package lm-eval; run pip install lm-eval." in capsys.readouterr().err
