"""Rows of JSON, JSON Lines, CSV and Parquet files, and of data sets in memory; errors name file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_MAX_FIELD = 1 << 30
"""Maximum number of characters in a field of a CSV file; long texts exceed Python's limit of 131 072."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """An object in a data file.

    Attributes:
        file: Path of the file, as given.
        line: Line number in a JSONL file, index of the object in other files; both start at 1.
        values: The object; ``None`` if it cannot be read.
        error: Why it cannot be read.

    Examples:
        >>> row = DataRow("data.jsonl", 3, {"query": "1+1"})
        >>> row.text("query")
        '1+1'
        >>> row.text("querry")
        Traceback (most recent call last):
        ValueError: data.jsonl:3: expected a field 'querry'; did you mean 'query'?
    """

    file: str
    line: int
    values: Mapping[str, Any] | None
    error: str = ""

    @property
    def location(self) -> str:
        """File and line, for error messages."""
        return f"{self.file}:{self.line}"

    def require_values(self, fix: str = "correct the line") -> Mapping[str, Any]:
        """Return the object.

        Raises:
            ValueError: If the row cannot be read; the message ends with ``fix``.
        """
        if self.values is None:
            raise ValueError(f"{self.location}: {self.error}; {fix}.")
        return self.values

    def text(self, field: str, fix: str = "add it") -> str:
        """Return the text in a field.

        Args:
            field: The field's name.
            fix: What to do if the field is missing.

        Raises:
            ValueError: If the field is missing (the message suggests the nearest name) or not text.
        """
        values = self.require_values()
        if field not in values:
            close = get_close_matches(field, list(values), n=1)
            names = ", ".join(map(repr, values)) or "none"
            hint = f"did you mean {close[0]!r}?" if close else f"it has {names}; {fix}."
            raise ValueError(f"{self.location}: expected a field {field!r}; {hint}")
        value = values[field]
        if not isinstance(value, str):
            advice = "fill it in, or remove the row" if value is None else "quote it"
            advice = "write its text" if isinstance(value, Mapping | list | tuple) else advice
            raise ValueError(
                f"{self.location}: expected text in field {field!r}, got {type(value).__name__}; {advice}."
            )
        return self.check_unicode(field, value)

    def check_unicode(self, field: str, text: str) -> str:
        """Return a field's text if it can be encoded.

        Raises:
            ValueError: If the text has a lone surrogate, which JSON can contain but no encoding can represent.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self.location}: expected Unicode in field {field!r}, got a lone surrogate; remove its \\udXXX."
            ) from error
        return text


def read_rows(file: str) -> Iterator[DataRow]:
    """Read a JSON, JSONL or CSV file (also ``.gz``), or a Parquet file.

    Args:
        file: Path of the file; its suffix determines the format.

    Yields:
        A row per object. An invalid line of a JSONL file, or an entry that is not an object, is a row with an error.

    Raises:
        ValueError: If the file is missing, empty, not UTF-8, or invalid as a whole.
    """
    path = Path(file)
    name = path.name.removesuffix(".gz")
    if path.is_file() and not name.endswith((".json", ".jsonl", ".csv", ".parquet")):
        raise ValueError(
            f"{file}: expected a name ending in .json, .jsonl, .csv (also with .gz) or .parquet; rename or convert it."
        )
    if name.endswith(".parquet"):
        rows = _parse_parquet(file)
    else:
        parse = {".jsonl": parse_json_lines, ".csv": _parse_csv}.get(Path(name).suffix, _parse_json_list)
        rows = parse(file, read_data_text(path))
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise ValueError(f"{file}: expected at least one sample, got an empty file; give another.")


def read_data_text(path: Path) -> str:
    """Return the text of a UTF-8 file, compressed (``.gz``) or not.

    Raises:
        ValueError: If the file does not exist or cannot be read; the message names file and line.
    """
    _require_file(path)
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{line}: expected UTF-8 text, got another encoding ({error.reason}); convert it."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error}); fetch it again.") from error


def _require_file(path: Path) -> None:
    """Refuse a directory, and a path without a file."""
    if path.is_dir():
        raise ValueError(f"{path}: expected a data file, got a directory; name its files in a list.")
    if not path.is_file():
        raise ValueError(f"{path}: expected a data file, but there is none; check the path (relative to {Path.cwd()}).")


def parse_json_lines(file: str, text: str) -> Iterator[DataRow]:
    """Yield the rows of JSON Lines; blank lines are skipped, and an invalid line is a row with an error.

    Only a line feed ends a line: other line separators of Unicode, such as U+2028, are characters of a text.

    Args:
        file: Where the text comes from, for messages.
        text: The lines.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _row(file, number, json.loads(line))
        except (ValueError, RecursionError) as error:
            is_object = line.lstrip().startswith("{")
            reason = "" if is_object else "; a line is an object in braces, and other formats end in .csv or .json"
            row = DataRow(file, number, None, f"broken JSON ({error}){reason}")
        yield row


def _parse_json_list(file: str, text: str) -> Iterator[DataRow]:
    if not text.strip():
        return
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"{file}:{line}: broken JSON ({error}); if it is JSONL, rename it to .jsonl.") from error
    if not isinstance(values, list):
        raise ValueError(f"{file}: expected a list of objects, got {type(values).__name__}; put it into a list.")
    for number, value in enumerate(values, start=1):
        yield _row(file, number, value)


def _parse_csv(file: str, text: str) -> Iterator[DataRow]:
    """Yield the rows of a CSV file whose first line names the fields, between commas, semicolons or tabs."""
    csv.field_size_limit(_MAX_FIELD)
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    try:
        for values in reader:
            if not names:
                names = values
                if len(set(names)) < len(names):
                    raise ValueError(f"{file}:1: expected each field once, got {names}; rename the columns.")
            elif values:
                error = f"expected {len(names)} fields ({', '.join(names)}), got {len(values)}"
                row = dict(zip(names, values, strict=False)) if len(values) == len(names) else None
                yield DataRow(file, reader.line_num, row, "" if row else error)
    except csv.Error as error:
        raise ValueError(f"{file}:{reader.line_num}: broken CSV ({error}); save it again.") from error


def _parse_parquet(file: str) -> Iterator[DataRow]:
    """Yield the rows of a Parquet file, which the package pyarrow reads."""
    _require_file(Path(file))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{file}: needs the package pyarrow; run pip install pyarrow.") from error
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield DataRow(file, number, drop_nested_nulls(values))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: cannot be read as Parquet ({error}); fetch it again.") from error


def rows_in(data: Any) -> Iterator[DataRow]:  # noqa: ANN401 - any data set
    """Yield the rows of a data set in memory: anything with items that are mappings.

    Args:
        data: The data set: a list, or an object with ``__len__`` and ``__getitem__``, or an iterable.

    Raises:
        ValueError: If it is no data set, or an item is no mapping.
    """
    is_indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping | str)
    is_iterable = hasattr(data, "__iter__") and not isinstance(data, Mapping | str)
    if not is_indexed and not is_iterable:
        raise ValueError(
            f"data.task.train: expected files, or a data set of mappings, got {data!r:.80}; pass a list of dicts."
        )
    name = type(data).__name__

    def items() -> Iterator[Any]:
        for index in range(len(data)):
            try:
                yield data[index]
            except LookupError as error:
                raise ValueError(
                    f"data.task.train: expected mappings at the indices 0 to {len(data) - 1} of {name}, got none at "
                    f"{index}; pass a list of dicts (of a DataFrame, its to_dict('records'))."
                ) from error

    has_columns = hasattr(data, "features")  # a data set of the package datasets
    for number, values in enumerate(items() if is_indexed else data, start=1):
        if not isinstance(values, Mapping):
            raise ValueError(
                f"data.task.train: expected mappings such as {{'query': ..., 'response': ...}} in {name}, got "
                f"{type(values).__name__} at index {number - 1}; return dicts."
            )
        yield DataRow(name, number, drop_nested_nulls(values) if has_columns else dict(values))


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a CSV file's text, with a column for every field; lists and mappings are written as JSON.

    >>> print(format_csv([{"name": "a", "size": 4}, {"name": "b", "options": [1, 2]}]), end="")
    name,size,options
    a,4,
    b,,"[1, 2]"
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: json.dumps(v) if isinstance(v, dict | list | tuple) else v for k, v in row.items()})
    return text.getvalue()


def nans_to_nulls(row: DataRow) -> DataRow:
    """Return a row with nulls in place of NaN, which pandas writes where a value is missing.

    >>> nans_to_nulls(DataRow("x", 1, {"query": "a", "input": float("nan")})).values
    {'query': 'a', 'input': None}
    """
    if row.values is None:
        return row
    is_nan = {name: isinstance(value, float) and math.isnan(value) for name, value in row.values.items()}
    return replace(row, values={name: None if is_nan[name] else value for name, value in row.values.items()})


def drop_nested_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the nulls in its structs.

    A column of structs has the fields of all rows: the arguments of a tool call, say, have the arguments of all other
    calls as nulls. The fields of the row itself, and a chat turn's content, stay.

    >>> drop_nested_nulls({"query": None, "tools": [{"name": "add", "unit": None}]})
    {'query': None, 'tools': [{'name': 'add'}]}
    """
    return {name: _drop_nulls(value) for name, value in row.items()}


def _drop_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, Mapping):
        is_turn = "role" in value or "from" in value
        kept = {name: item for name, item in value.items() if item is not None or (is_turn and name == "content")}
        return {name: _drop_nulls(item) for name, item in kept.items()}
    return [_drop_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _row(file: str, number: int, values: object) -> DataRow:
    if not isinstance(values, dict):
        return DataRow(file, number, None, f"expected a JSON object, got {type(values).__name__}")
    return DataRow(file, number, values)
