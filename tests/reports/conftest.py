"""Reports of tests have intervals of few resamples."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refusion_lit.reports.intervals.NUM_RESAMPLES", 50)
