"""Saved traces: a round trip keeps them, and invalid files are refused with a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refusion_lit.traces.document import read_trace, write_trace
from traces.samples import plan_and_verify, random_trace


@pytest.mark.parametrize("seed", range(5))
def test_round_trip(seed: int, tmp_path: Path) -> None:
    trace = random_trace(seed)
    write_trace(trace, tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == trace
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_round_trip_of_hostile_text(tmp_path: Path) -> None:
    trace = plan_and_verify({1: "</script>", 2: "\u2028", 3: "\x1b[2J", 4: "\ud800"})
    write_trace(trace, tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == trace


@pytest.mark.parametrize(("name", "value"), [("prompt", 5), ("slot_size", 0), ("rounds", {}), ("pieces", {"1": None})])
def test_a_changed_trace_is_refused(name: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    write_trace(plan_and_verify(), file)
    document = json.loads(file.read_text())
    document["trace"][name] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"trace_file: expected a trace as it was written, got .*"):
        read_trace(file)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"format": "refusion-lit-trace"}']
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ValueError, match="trace_file: "):
        read_trace(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"^trace_file: .* is not a file"):
        read_trace(tmp_path)


def test_every_missing_entry_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    write_trace(plan_and_verify(), file)
    document = json.loads(file.read_text())
    assert set(document) == {"format", "version", "digest", "trace"}
    for name in document:
        file.write_text(json.dumps({key: value for key, value in document.items() if key != name}))
        with pytest.raises(ValueError, match="trace_file: expected "):
            read_trace(file)
