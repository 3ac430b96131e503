"""Reads rows of instruction data from files, remembering where each came from."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a file.

    Attributes:
        file: The file's path as it was given.
        line: Line of a JSONL file, or number of the object in another one; from 1.
        values: The object; ``None`` with ``error`` set where it cannot be read.
        error: Why it cannot be read.
        starts_on: Line on which an object of a JSON list starts.
    """

    file: str
    line: int
    values: Mapping[str, Any] | None
    error: str = ""
    starts_on: int | None = None

    @property
    def where(self) -> str:
        """File and line, for messages."""
        if self.starts_on is None:
            return f"{self.file}:{self.line}"
        return f"{self.file}:{self.starts_on} (object {self.line})"


def read_rows(file: str) -> Iterator[Row]:
    """Read a JSON, JSONL (also ``.gz``) or Parquet file.

    Args:
        file: Its path; the ending says what it is.

    Yields:
        One row an object; a broken line of a JSONL file is a row with an error.

    Raises:
        ValueError: If the file is missing, empty, in another encoding, or not what its ending says.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(
            f"{file}: expected a data file, but it does not exist; check the path (relative to {Path.cwd().name}/)."
        )
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        rows = _parquet(file)
    elif name.endswith(".jsonl"):
        rows = _json_lines(file, _text(path))
    elif name.endswith(".json"):
        rows = _json(file, _text(path))
    else:
        raise ValueError(
            f"{file}: expected a name ending in .json, .jsonl, .json.gz, .jsonl.gz or .parquet; rename it."
        )
    count = 0
    for row in rows:
        count += 1
        yield row
    if count == 0:
        raise ValueError(f"{file}: expected at least one sample, got an empty file.")


def text_field(row: Row, field: str) -> str:
    """Return a field's text.

    Raises:
        ValueError: If it is missing (naming the nearest that exists) or not text.
    """
    assert row.values is not None
    if field not in row.values:
        close = get_close_matches(field, list(row.values), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, row.values)) or 'none'}."
        raise ValueError(f"{row.where}: expected a field {field!r}; {hint}")
    value = row.values[field]
    if not isinstance(value, str):
        raise ValueError(f"{row.where}: expected text in field {field!r}, got {type(value).__name__}.")
    return unicode_text(row, field, value)


def unicode_text(row: Row, field: str, text: str) -> str:
    """Return a text.

    Raises:
        ValueError: If it holds half a surrogate pair (JSON can write one), which no encoding can express.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{row.where}: expected Unicode in field {field!r}, got half a surrogate pair; mend it."
        ) from error
    return text


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{line}: expected UTF-8 text, got another encoding ({error.reason}); convert it."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error}).") from error


def _json_lines(file: str, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _row(file, number, line)


def _row(file: str, number: int, line: str) -> Row:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(file, number, None, f"broken JSON ({error})")
    return _object(file, number, values)


def _object(file: str, number: int, values: object, starts_on: int | None = None) -> Row:
    if not isinstance(values, dict):
        return Row(file, number, None, f"expected a JSON object, got {type(values).__name__}", starts_on)
    return Row(file, number, values, starts_on=starts_on)


def _json(file: str, text: str) -> Iterator[Row]:
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"{file}:{line}: broken JSON ({error}); is it JSONL? Then rename it to .jsonl.") from error
    if not isinstance(values, list):
        raise ValueError(f"{file}: expected a list of objects, got {type(values).__name__}.")
    for number, (value, line) in enumerate(zip(values, _lines_of_elements(text), strict=False), start=1):
        yield _object(file, number, value, line)


def _lines_of_elements(text: str) -> Iterator[int]:
    """Yield the lines on which the elements of a valid JSON list start, which ``json.loads`` does not tell."""
    decoder = json.JSONDecoder()
    end, line = text.index("[") + 1, text.count("\n", 0, text.index("[") + 1) + 1
    while True:
        separator = _BETWEEN.match(text, end)
        assert separator is not None
        line += separator[0].count("\n")
        yield line
        _, after = decoder.raw_decode(text, separator.end())
        line, end = line + text.count("\n", separator.end(), after), after


def _parquet(file: str) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"{file}: Parquet needs the package pyarrow; install refusion-lit[data].") from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        raise ValueError(
            f"{file}: expected a Parquet file, got something else ({str(error).splitlines()[0]})."
        ) from error
    for number, values in enumerate(rows, start=1):
        yield Row(file, number, values)
