"""Arbitrary predictions files are shown in a report or named in its notes, and their text never becomes markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardness.malformed import MARKUP, NUM_EXAMPLES, PHASES, damaged_files, with_replaced_values
from refusion_lit.reports.comparison import compare
from refusion_lit.reports.rows import read_rows
from refusion_lit.reports.tables import csv_table, latex_table, markdown_table
from refusion_lit.reports.write import html_report
from reports.samples import prediction, write_run
from support.parsed_page import ParsedPage

FUZZ = settings(max_examples=NUM_EXAMPLES, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _few_resamples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as context:
        context.setattr("refusion_lit.reports.intervals.NUM_RESAMPLES", 10)
        yield


def line(number: int) -> dict[str, object]:
    return prediction(f"p{number}", 0.5, 4, 2, text=MARKUP[number % len(MARKUP)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two decoders."""
    return write_run(tmp_path_factory.mktemp("run") / "run", {"one": [prediction("x")], "two": [prediction("x")]})


@FUZZ
@given(data=st.data())
def test_predictions(run: Path, data: st.DataObject) -> None:
    for name in ("one", "two"):
        lines = [json.dumps(line(number), ensure_ascii=False) for number in range(len(MARKUP))]
        lines += data.draw(st.lists(with_replaced_values(line(20)), max_size=3))
        content = data.draw(damaged_files("\n".join(lines).encode("utf-8", "surrogatepass"), max_edits=1))
        (run / f"predictions_{name}.jsonl").write_bytes(content)
    comparison = compare(*read_rows([run]), None)
    page = html_report(comparison)
    for text in (page, markdown_table(comparison), latex_table(comparison), csv_table(comparison)):
        text.encode()
    assert ParsedPage(page).unsafe == []
