"""Saved traces: a round trip keeps them, and invalid files are refused with a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refusion_lit.traces import Trace, read_trace, write_trace
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


CHANGES: list[tuple[str, list[Any], Any]] = [
    ("format", ["format"], "other"),
    ("version", ["version"], 2),
    ("prompt", ["prompt"], 5),
    ("prompt_length", ["prompt_length"], -1),
    ("prompt_length", ["prompt_length"], True),
    ("slot_size", ["slot_size"], 0),
    ("seconds", ["seconds"], "1"),
    (r"token_ids\[0\]", ["token_ids", 0], 1.5),
    ("rounds", ["rounds"], {}),
    (r"rounds\[1\]", ["rounds", 1], None),
    (r"rounds\[0\].shape", ["rounds", 0, "shape"], [1]),
    (r"rounds\[0\]: expected equal numbers", ["rounds", 0, "tokens"], [1]),
    (r"rounds\[0\].positions\[0\]", ["rounds", 0, "positions", 0], 10**12),
    (r"rounds\[0\].positions\[0\]", ["rounds", 0, "positions", 0], 2),
    (r"rounds\[0\].probabilities\[0\]", ["rounds", 0, "probabilities", 0], 1.5),
    (r"rounds\[1\].accepted", ["rounds", 1, "accepted"], [4, 4]),
    (r"rounds\[1\].scores", ["rounds", 1, "scores"], "0.5"),
    ("pieces", ["pieces"], {"-1": "a"}),
    (r"pieces\[1\]", ["pieces"], {"1": None}),
]


@pytest.mark.parametrize(("message", "path", "value"), CHANGES)
def test_wrong_values_are_named(message: str, path: list[Any], value: object, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    write_trace(plan_and_verify(), file)
    values = json.loads(file.read_text())
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"trace_file: .*{message}"):
        read_trace(file)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"format": "refusion-lit-trace"}']
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ValueError, match="trace_file: "):
        read_trace(tmp_path / "t.json")
    with pytest.raises(ValueError, match="which is not a file"):
        read_trace(tmp_path)


def test_every_missing_entry_is_named(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    write_trace(plan_and_verify(), file)
    values = json.loads(file.read_text())
    assert set(values) == {*Trace.__dataclass_fields__, "format", "version"}
    for name in values:
        file.write_text(json.dumps({key: value for key, value in values.items() if key != name}))
        with pytest.raises(ValueError, match=name):
            read_trace(file)
