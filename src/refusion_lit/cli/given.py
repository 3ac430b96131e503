"""The options that were given, on the command line and in the config files that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from refusion_lit.utils.files import read_yaml

MODULE_ERRORS = (SyntaxError, ImportError, NameError)
PARSER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, *MODULE_ERRORS)
"""What a parser raises for wrong arguments and for modules that it imports; PyYAML lets conversion errors through."""


@dataclass(frozen=True)
class Given:
    """An option that was given.

    Attributes:
        name: Its dotted name, without ``init_args``.
        value: Its value.
        file: The file that it stands in; empty on the command line.
    """

    name: str
    value: Any
    file: str = ""

    @property
    def where(self) -> str:
        """Return how a message about it begins."""
        return f"{self.file}: " if self.file else ""


def options_given(args: Sequence[str]) -> list[Given]:
    """Return the options of a command line and of its config files, those within others after them.

    Raises:
        ValueError: If a file cannot be read.
    """
    found: list[Given] = []
    waiting = list(args)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        if not name.startswith("-"):
            continue
        if not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        name = name.lstrip("-").removesuffix("+")
        if not value:
            continue  # a flag, or an option whose value is missing
        if name in ("c", "config"):
            for key, inner in read_yaml(Path(value), "config").items():
                found += _within(key, inner, value)
        else:
            try:
                found += _within(name, loaded(value), "")
            except RecursionError:
                raise ValueError(f"{name}: expected a value, got one that contains itself; write it out.") from None
    return found


def _within(name: str, value: object, file: str) -> Iterator[Given]:
    """Yield an option and those within its value, or within the file that its value names."""
    yield Given(name, value, file)
    if is_yaml_file(value) and Path(value).is_file():
        file = value
        value = read_yaml(Path(value), name)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _within(name if key == "init_args" else f"{name}.{key}", inner, file)


def is_yaml_file(value: object) -> TypeGuard[str]:
    """Return whether a value is the name of a YAML file, which may be missing."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def loaded(value: str) -> Any:  # noqa: ANN401 - any YAML
    """Return what a value on the command line stands for; text if it is no YAML."""
    try:
        return yaml.safe_load(value) if value.strip() else value
    except (yaml.YAMLError, *PARSER_ERRORS):
        return value
