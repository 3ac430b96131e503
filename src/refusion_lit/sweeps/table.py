"""Gathers a sweep's results into one tidy table: a row for each point and decoder."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refusion_lit.sweeps.files import OUTCOME, read_json, write_whole
from refusion_lit.sweeps.points import Point

Row = dict[str, Any]


def gather(directory: Path, points: Sequence[Point], swept: Sequence[str]) -> list[Row]:
    """Return the rows: the point, how it ended, its options, and a decoder's figures.

    Args:
        directory: The sweep's directory.
        points: The sweep's points; one without an outcome is ``pending``.
        swept: Names of the varying options, each a column.

    Returns:
        Rows with the same keys in the same order; figures are ``None`` for a point that did not finish.
    """
    rows = []
    for point in points:
        folder = directory / "points" / point.id
        outcome: Row = read_json(folder / OUTCOME) or {"status": "pending"}
        known = {
            "point": point.id,
            "status": outcome["status"],
            "seed": point.seed,
            "seconds": outcome.get("seconds"),
            "folder": str(folder),
            "error": outcome.get("error"),
            **{name: point.options.get(name) for name in swept},
        }
        results = outcome.get("results") or {None: {}}
        rows += [{**known, "decoder": decoder, **figures} for decoder, figures in results.items()]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def write_table(directory: Path, rows: Sequence[Row]) -> list[Path]:
    """Write ``results.csv`` and, where pyarrow is installed, ``results.parquet``; values without a cell type as JSON.

    Returns:
        The files written.
    """
    plain = [{name: _cell(value) for name, value in row.items()} for row in rows]
    columns = list(plain[0]) if plain else []
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    paths = [directory / "results.csv"]
    write_whole(paths[0], text.getvalue())
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return paths
    table = {name: _uniform([row[name] for row in plain]) for name in columns}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(table), buffer)
    paths.append(directory / "results.parquet")
    write_whole(paths[1], buffer.getvalue())
    return paths


def _cell(value: Any) -> Any:  # noqa: ANN401 - an option or a figure
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else value


def _uniform(values: list[Any]) -> list[Any]:
    """Return a column of one type: numbers of both kinds as floats, anything else mixed as text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    to = float if kinds == {int, float} else str
    return [None if value is None else to(value) for value in values]
