"""The predictions file: one JSON object a line, an interface that others build on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from refusion_lit.decoding import RowOutput

KEYS = ("id", "prompt", "response", "response_ids", "reference", "score", "num_tokens", "num_forwards",
        "forward_shapes", "seconds")  # fmt: skip


def prediction(
    row: RowOutput,
    *,
    prompt: str,
    response: str,
    reference: str | None,
    score: float | None,
    record_forwards: bool,
) -> dict[str, Any]:
    """Return one prediction with exactly the documented keys.

    Args:
        row: What the engine returned.
        prompt: The query as it was given.
        response: The text of the response.
        reference: The right response, if known.
        score: The response's score in [0, 1], if there is a reference.
        record_forwards: Whether to add ``forward_shapes``, pairs of rows and length of each forward.
    """
    values: dict[str, Any] = {
        "id": row.id,
        "prompt": prompt,
        "response": response,
        "response_ids": row.token_ids,
        "reference": reference,
        "score": score,
        "num_tokens": row.num_tokens,
        "num_forwards": row.num_forwards,
        "seconds": round(row.seconds, 6),
    }
    if record_forwards:
        values["forward_shapes"] = [list(shape) for shape in row.forward_shapes]
    return {key: values[key] for key in KEYS if key in values}


def write_line(file: TextIO, values: dict[str, Any]) -> None:
    """Write one prediction and flush, so that an interrupted run loses nothing."""
    file.write(json.dumps(values, ensure_ascii=False) + "\n")
    file.flush()


def write_lines(path: str | Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a whole predictions file."""
    with Path(path).open("w", encoding="utf-8") as file:
        for values in lines:
            write_line(file, values)
