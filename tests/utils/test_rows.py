"""Rows of every format survive a round trip, and errors name file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.evaluation.predictions import as_line, read_json_lines
from refusion_lit.utils.rows import read_rows
from tasks.samples import ROWS

VALUES = st.one_of(st.text(), st.integers(), st.none(), st.lists(st.text(), max_size=2))
OBJECTS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "json.gz"])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    text = json.dumps(ROWS) if kind in ("json", "json.gz") else "\n".join(map(json.dumps, ROWS))
    if kind.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    rows = list(read_rows(str(path)))
    assert [dict(row.values or {}) for row in rows] == ROWS
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6]


@given(rows=OBJECTS, ending=st.sampled_from(["", "\n", "\r\n", "\n\n"]), zipped=st.booleans(), mark=st.booleans())
def test_json_lines_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], ending: str, zipped: bool, mark: bool
) -> None:
    text = "\ufeff" * mark + (ending or "\n").join(json.dumps(row, ensure_ascii=False) for row in rows) + ending
    path = tmp_path_factory.mktemp("rows") / ("rows.jsonl.gz" if zipped else "rows.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    actual = list(read_rows(str(path)))
    assert [row.values for row in actual] == rows
    step = 2 if ending == "\n\n" else 1  # empty lines count, as in an editor
    assert [row.line for row in actual] == list(range(1, step * len(rows) + 1, step))


@given(rows=OBJECTS, indent=st.sampled_from([None, 0, 2]), before=st.sampled_from(["", "\n\n ", "\r\n"]))
def test_json_lists_round_trip_and_know_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], indent: int | None, before: str
) -> None:
    text = before + json.dumps(rows, indent=indent)
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_bytes(text.encode())
    actual = list(read_rows(str(path)))
    assert [row.values for row in actual] == rows
    assert [row.line for row in actual] == [*range(1, len(rows) + 1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl: .*empty"),
        ("a.jsonl", b" \n\n", r"a\.jsonl: .*empty"),
        ("a.json", b"", r"a\.json: .*empty"),
        ("a.json", b"[]", r"a\.json: .*empty"),
        ("a.json", b'{"a": 1}', r"a\.json: .*list.*, got dict"),
        ("a.json", b'[{"a": 1},\n{"a": }]', r"a\.json:2: broken JSON"),
        ("a.json", b'[{"a": 1},\n{"a": 2}\n', r"a\.json:3: broken JSON"),
        ("a.json", b'{"a": 1}\n{"a": 2}', r"a\.json:2: broken JSON .*\.jsonl"),
        ("a.json", b"[" * 100_000, r"a\.json:1: broken JSON"),
        ("a.json", b'[\n{"a": "\xff"}]', r"a\.json:2: .*UTF-8"),
        ("a.jsonl", '{"a": "é"}\n'.encode("utf-16"), r"a\.jsonl:1: .*UTF-8"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1}\n{"a": "caf\xe9"}', r"a\.jsonl:3: .*UTF-8"),
        ("a.jsonl.gz", b'{"a": 1}', r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0)[:-9], r"a\.jsonl\.gz: cannot be read"),
        (
            "a.jsonl.gz",
            gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20,
            r"a\.jsonl\.gz: cannot be read",
        ),
        ("a.json.gz", gzip.compress(b"[{}", mtime=0), r"a\.json\.gz:1: broken JSON"),
        ("a.parquet", b"PAR1", r"a\.parquet: cannot be read as Parquet"),
        ("a.csv", b"a,b", r"a\.csv: .*empty"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(str(path)))


def test_a_long_field_of_csv_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("query\n" + "x" * 200_000 + "\n")
    [row] = read_rows(str(path))
    assert len(row.text("query")) == 200_000


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "no.jsonl", tmp_path):
        with pytest.raises(ValueError, match="expected a data file"):
            list(read_rows(str(path)))


@pytest.mark.parametrize(
    ("name", "content", "where", "error"),
    [
        ("a.jsonl", '{"a": "b"}\n\n{"a": \n', "a.jsonl:3", "broken JSON"),
        ("a.jsonl", '{"a": "b"}\n{"a": ' + "1" * 5000 + "}\n", "a.jsonl:2", "broken JSON"),
        ("a.jsonl", '{"a": "b"}\n"text"\n', "a.jsonl:2", "expected a JSON object, got str"),
        ("a.jsonl", '{"a": "b"}\n' + "[" * 100_000, "a.jsonl:2", "broken JSON"),
        ("a.json", '[{"a": "b"},\n\n null]', "a.json:2", "expected a JSON object, got NoneType"),
    ],
)
def test_rows_that_cannot_be_read_leave_the_others_alone(
    tmp_path: Path, name: str, content: str, where: str, error: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    good, bad = read_rows(str(path))
    assert good.values == {"a": "b"}
    assert bad.values is None
    assert bad.location == str(tmp_path / where)
    assert bad.error.startswith(error)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"responce": "b"}', r"a\.jsonl:1: .*'response'.* 'responce'"),
        (
            '{"x": "b", "y": "c"}',
            r"a\.jsonl:1: .*'response'.* 'x', 'y'",
        ),
        ("{}", r"a\.jsonl:1: .*'response'.* none"),
        ('{"response": null}', r"a\.jsonl:1: .*text.*'response', got NoneType"),
        ('{"response": ["b"]}', r"a\.jsonl:1: .*text.*'response', got list"),
        (
            r'{"response": "b\ud83d"}',
            r"a\.jsonl:1: .*Unicode.*'response', got a lone surrogate",
        ),
    ],
)
def test_fields_that_cannot_be_used(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(row)
    (actual,) = read_rows(str(path))
    with pytest.raises(ValueError, match=message):
        actual.text("response")


def test_escaped_surrogate_pairs_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"response": "\ud83d\ude00"}')
    (actual,) = read_rows(str(path))
    assert actual.text("response") == "\N{GRINNING FACE}"


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_only_a_line_feed_ends_a_json_line(tmp_path: Path, name: str) -> None:
    rows = [{"id": str(i), "response": f"a{separator}b"} for i, separator in enumerate("\u2028\u2029\x85\x0c\x1c\n\r")]
    text = "\r\n \n".join(map(as_line, rows)).encode()
    assert "\u2028".encode() in text
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert read_json_lines(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("p.jsonl", b'{"id": ', r"predictions: .*p\.jsonl:3: broken JSON .*"),
        ("p.jsonl", b"[" * 100_000, r"predictions: .*p\.jsonl:3: broken JSON .*"),
        ("p.jsonl", b"[1]", r"predictions: .*p\.jsonl:3: .*object, got list.*"),
        ("p.jsonl", b'{"id": 3}', r"predictions: .*p\.jsonl:3: .*text.*'id', got int.*"),
        ("p.jsonl", b"{}", r"predictions: .*p\.jsonl:3: .*'id'.*"),
        ("p.gz", b"", r"predictions: .*p\.gz: cannot be read .*"),
        (
            "p.jsonl/none",
            b"",
            r"predictions: .*none: expected a data file.*",
        ),
    ],
)
def test_a_broken_json_line_is_named(tmp_path: Path, name: str, line: bytes, message: str) -> None:
    path = tmp_path / name
    (tmp_path / Path(name).parts[0]).write_bytes(b'{"id": "a"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_json_lines(path, "predictions", texts=("id",))
