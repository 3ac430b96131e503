"""YAML files of options: plain values under names, or a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

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
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{option}: expected a YAML file, got {path} ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {path} is not UTF-8 text ({error.reason}); convert it.") from error
    # What PyYAML raises for numbers and dates that are none (!!int x, 2001-99-99) is not its own error.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"{option}: {path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        raise ValueError(f"{option}: expected options by name in {path}, got an empty file; leave it out.")
    if not isinstance(values, dict):
        raise ValueError(f"{option}: expected options by name in {path}, got {type(values).__name__}.")
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
