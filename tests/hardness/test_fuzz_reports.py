"""Predictions of any content go into a report or are named in its notes; their text stays text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardness.spoiling import MARKUP, NUM_EXAMPLES, PHASES, damaged, with_other_values
from refusion_lit.reports import compare, read_runs
from refusion_lit.reports.intervals import Resampling
from refusion_lit.reports.page import html_page
from refusion_lit.reports.papers import latex_table, markdown_table

FUZZ = settings(max_examples=NUM_EXAMPLES, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))
QUICK = Resampling(num_resamples=10)


class Tags(HTMLParser):
    """Collects what could run or load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.dangerous: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "svg", "iframe", "object", "embed", "link", "base", "form"):
            self.dangerous.append(tag)
        for name, value in attributes:
            if name.startswith("on") or (name in ("src", "href") and not (value or "").startswith(("data:", "#"))):
                self.dangerous.append(f"{tag} {name}={value}")


def line(number: int) -> dict[str, object]:
    text = MARKUP[number % len(MARKUP)]
    return {"id": f"p{number}", "prompt": text, "response": text, "response_ids": [3], "reference": text, "score": 0.5,
            "num_tokens": 4, "num_forwards": 2, "seconds": 0.1}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two decoders whose predictions are still to be written."""
    folder = tmp_path_factory.mktemp("run")
    figures = {
        "score": 0.5, "tokens_per_forward": 2.0, "num_prompts": 3, "num_forwards": 6, "calls_per_batch": 7.5,
        "tokens_per_second": 123.4, "positions_per_token": 2.0, "latency_median": 0.1, "latency_p95": 0.2,
    }  # fmt: skip
    content = {
        "sampling": {"max_new_tokens": 8}, "batch_size": 3, "decoders": {"one": {}, "two": {}}, "mismatches": {},
        "results": {"one": figures, "two": figures}, "config": {"note": MARKUP[0]},
        "environment": {"command": ["refusion-lit", MARKUP[1]], "seed": 1, "git": None, "packages": {}},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(content))
    return folder


@FUZZ
@given(data=st.data())
def test_predictions(run: Path, data: st.DataObject) -> None:
    for name in ("one", "two"):
        lines = [json.dumps(line(number), ensure_ascii=False) for number in range(len(MARKUP))]
        lines += data.draw(st.lists(with_other_values(line(20)), max_size=3))
        content = data.draw(damaged("\n".join(lines).encode("utf-8", "surrogatepass"), max_edits=1))
        (run / f"predictions_{name}.jsonl").write_bytes(content)
    comparison = compare(read_runs([run]), None, QUICK)
    page = html_page(comparison, {"tradeoff.png": b""})
    for text in (page, latex_table(comparison), markdown_table(comparison)):
        text.encode()
    assert not Tags(page).dangerous
