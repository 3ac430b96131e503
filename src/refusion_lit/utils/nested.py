"""Nested options, such as configs and results."""

from __future__ import annotations

from typing import Any


def get_nested(values: Any, name: str) -> Any:  # noqa: ANN401 - nested mappings, or jsonargparse's namespaces
    """Return a nested value by its dotted name; ``None`` if a part of the name is missing or has no value.

    >>> get_nested({"model": {"seed": 3, "decoding": None}}, "model.seed")
    3
    >>> get_nested({"model": {"seed": 3, "decoding": None}}, "model.decoding.verifier")
    """
    for part in name.split("."):
        values = values.get(part) if hasattr(values, "get") else None
    return values
