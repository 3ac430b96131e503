from __future__ import annotations

import io

import pytest
from rich.console import Console

from refusion_lit.sweeps.progress import SweepProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("refusion_lit.sweeps.progress.time.monotonic", lambda: now[0])
    return now


def test_plain_lines_if_the_console_is_not_a_terminal(clock: list[float]) -> None:
    out = io.StringIO()
    with SweepProgress(3, Console(file=out, width=20)) as progress:
        progress.tick()
        clock[0] += 4000
        progress.ended("x=[red]1[/red]", "finished", 12.34, None)
        progress.ended("x=2", "failed", None, "it broke\nhere")
    assert out.getvalue().splitlines() == [
        "[1/3] finished in 12.3 s: x=[red]1[/red] (about 2:13:20 left)",  # 4000 s per point, two left
        "[2/3] failed: x=2 (about 0:33:20 left)",
        "it broke",
        "here",
    ]


def test_a_bar_with_the_time_left_on_a_terminal() -> None:
    out = io.StringIO()
    with SweepProgress(2, Console(file=out, force_terminal=True, width=120)) as progress:
        progress.tick()
        progress.ended("x=1", "failed", 1.0, "it broke")
    text = out.getvalue()
    assert "1/2" in text
    assert "left, 1 failed" in text
    assert "it broke" in text
