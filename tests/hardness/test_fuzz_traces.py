"""Arbitrary trace files are shown or refused with a clear error, and their text never becomes markup."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from hardness.malformed import MARKUP, NUM_EXAMPLES, PHASES, damaged_files, outcome, raw_json, with_replaced_values
from refusion_lit.traces.display import animate, page, print_statistics
from refusion_lit.traces.document import Trace, read_trace, write_trace
from support.parsed_page import ParsedPage
from traces.samples import random_trace

FUZZ = settings(max_examples=NUM_EXAMPLES, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


MARKUP_OF_PAGE = ParsedPage(page(random_trace(0))).markup


def check_shown(trace: Trace, folder: Path) -> None:
    write_trace(trace, folder / "again.json")
    assert read_trace(folder / "again.json") == trace
    for is_terminal in (False, True):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=is_terminal, width=80, height=20)
        animate(trace, console=console, sleep=lambda _: None)
        print_statistics(trace, console=console)
        shown = screen.getvalue()
        if not is_terminal:
            assert not {c for c in shown if c < " " or "\x7f" <= c < "\xa0"} - {"\n"}, "a control character"
        shown.encode()
    text = page(trace)
    text.encode()
    parsed = ParsedPage(text)
    assert parsed.markup == MARKUP_OF_PAGE, "text of the model became markup"
    assert json.loads(parsed.contents("script")[0])["statistics"]["tokens"] == str(len(trace.token_ids))


def check_refused_or_shown(path: Path, folder: Path) -> None:
    """Check that a trace file that cannot be read is refused by its option's name, and another one is shown."""
    trace = outcome(lambda: read_trace(path))
    if isinstance(trace, str):
        assert trace.startswith("trace_file: ")
    else:
        check_shown(trace, folder)


@FUZZ
@given(seed=st.integers(0, 99), data=st.data())
def test_a_trace_with_replaced_values(folder: Path, seed: int, data: st.DataObject) -> None:
    path = folder / "trace.json"
    write_trace(random_trace(seed), path)
    path.write_text(data.draw(with_replaced_values(json.loads(path.read_text()))))
    check_refused_or_shown(path, folder)


@FUZZ
@given(seed=st.integers(0, 99), data=st.data())
def test_a_damaged_trace(folder: Path, seed: int, data: st.DataObject) -> None:
    path = folder / "trace.json"
    write_trace(random_trace(seed), path)
    content = data.draw(st.one_of(damaged_files(path.read_bytes()), raw_json().map(str.encode), st.binary(max_size=40)))
    path.write_bytes(content)
    check_refused_or_shown(path, folder)


@FUZZ
@given(seed=st.integers(0, 99), texts=st.lists(st.sampled_from(MARKUP) | st.text(max_size=6), min_size=1, max_size=9))
def test_any_text_of_a_model_is_shown_as_text(folder: Path, seed: int, texts: list[str]) -> None:
    def text(number: int) -> str:
        return texts[number % len(texts)]

    trace = random_trace(seed)
    hostile = replace(
        trace,
        decoder=text(0),
        prompt=text(1),
        response=text(2),
        finish_reason=text(3),
        pieces={token: text(token) for token in trace.pieces},
        rounds=tuple(replace(entry, phase=text(0)) for entry in trace.rounds),
    )
    check_shown(hostile, folder)
