"""Collects the results of a sweep into one tidy table with a row per point and decoder."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refusion_lit.sweeps.files import OUTCOME
from refusion_lit.sweeps.points import Point
from refusion_lit.utils.files import read_json, write_atomically

Row = dict[str, Any]


def collect_rows(directory: Path, points: Sequence[Point], swept: Sequence[str]) -> list[Row]:
    """Return the rows of the table: the point, its status and swept options, and the figures of one decoder.

    Args:
        directory: The sweep's directory.
        points: The sweep's points; one without an outcome has the status ``pending``.
        swept: Names of the swept options, which are columns.

    Returns:
        Rows with the same keys in the same order. ``mismatch`` holds the reasons why the model was not trained for the
        decoder, and is empty if it was. ``point_seconds`` is the duration of the point's processes, ``seconds`` that of
        decoding. The figures of an unfinished point are ``None``.
    """
    rows = []
    for point in points:
        folder = directory / "points" / point.id
        outcome: Row = read_json(folder / OUTCOME) or {"status": "pending"}
        common = {
            "point": point.id,
            "status": outcome["status"],
            "seed": point.seed,
            "point_seconds": outcome.get("seconds"),
            "folder": str(folder),
            "error": outcome.get("error"),
            **{name: point.options.get(name) for name in swept},
        }
        results = outcome.get("results") or {None: {}}
        mismatches = outcome.get("mismatches") or {}
        for decoder, figures in results.items():
            reasons = "; ".join(mismatches.get(decoder, [])) if figures else None
            rows.append({**common, "decoder": decoder, "mismatch": reasons, **figures})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def write_table(directory: Path, rows: Sequence[Row]) -> list[Path]:
    """Write ``results.csv`` and, if pyarrow is installed, ``results.parquet``; lists and mappings become JSON texts.

    Returns:
        The files written.
    """
    rows = [{name: _cell(value) for name, value in row.items()} for row in rows]
    columns = list(rows[0]) if rows else []
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    paths = [directory / "results.csv"]
    write_atomically(paths[0], text.getvalue())
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return paths
    table = {name: _uniform([row[name] for row in rows]) for name in columns}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(table), buffer)
    paths.append(directory / "results.parquet")
    write_atomically(paths[1], buffer.getvalue())
    return paths


def _cell(value: Any) -> Any:  # noqa: ANN401 - an option or a figure
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else value


def _uniform(values: list[Any]) -> list[Any]:
    """Return a column of one type: integers and floats become floats, any other mixture becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    to = float if kinds == {int, float} else str
    return [None if value is None else to(value) for value in values]
