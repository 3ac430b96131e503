"""YAML files of options: plain values under names, or a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from refusion_lit.utils.files import read_text

Options = dict[str, Any]


def read_yaml(path: Path, option: str) -> Options:
    """Read a YAML file of options.

    Args:
        path: The file.
        option: What asked for it, for messages.

    Returns:
        Options by name; their values are texts, numbers, booleans, nulls, and lists and options of such.

    Raises:
        ValueError: If it is missing, no YAML, or holds something else.
    """
    text = read_text(path, option, "a YAML file")
    try:
        values = yaml.safe_load(text)
    # What PyYAML raises for numbers and dates that are none (!!int x, 2001-99-99) is not its own error.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{option}: {path} is not YAML ({reason}); correct the file.") from error
    if values is None:
        raise ValueError(f"{option}: expected options by name in {path}, got an empty file; leave it out.")
    if not isinstance(values, dict):
        got = type(values).__name__
        raise ValueError(f"{option}: expected options by name in {path}, got {got}; write them as NAME: VALUE.")
    _check_plain(values, f"{option}: {path}", ())
    return values


def _check_plain(value: object, where: str, above: tuple[int, ...]) -> None:
    if isinstance(value, dict | list):
        if id(value) in above:
            raise ValueError(f"{where}: expected values, got a list or group that contains itself; write it out.")
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise ValueError(f"{where}: expected names of options, got {key!r}; put it in quotes.")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_plain(inner, where, (*above, id(value)))
    elif not (value is None or isinstance(value, str | int | float)):
        raise ValueError(
            f"{where}: expected text, numbers, lists and groups of options, got {type(value).__name__} {value!r}; "
            "put it in quotes."
        )
