"""An argument parser whose errors are one line that names the nearest right option."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from refusion_lit.cli.suggestions import nearest
from refusion_lit.yaml_files import read_yaml

_UNKNOWN = (
    re.compile(r"Key '(?P<name>[^']+)' is not expected"),
    re.compile(r"Unrecognized arguments?: -*(?P<name>[^\s=]+)", re.IGNORECASE),
    re.compile(r"No action for key \"?'?(?P<name>[\w.]+)"),
    re.compile(r"Group '[^']*' does not accept nested key '(?P<name>[^']+)'"),
    re.compile(r"does not accept (?:nested )?key '(?P<name>[^']+)'"),
    re.compile(r"Option '(?P<name>[^']+)' is not accepted"),
    re.compile(r"does not accept option '(?P<name>[^']+)'"),
)
_CLASS = re.compile(
    r"(?:Unexpected import path format: |No subclass of .* named |Expected a dot import path string: )"
    r"(?P<name>[\w.]+)"
)
_UNION = re.compile(
    r"(?P<key>[\w.]+: )?Does not validate against any of the Union subtypes.* Errors: - (?P<first>.*?) - Exp"
)


class UsageError(ValueError):
    """Wrong use of the command line."""


class _OneLineErrors:
    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:  # noqa: ANN401
        """Parse; a config file that is no YAML is refused by its name.

        Raises:
            UsageError: If something is wrong.
        """
        try:
            return super().parse_args(args, *rest, **options)  # type: ignore[misc]
        # What PyYAML raises for such files is often not its own error, and passes through jsonargparse.
        except (UnicodeDecodeError, TypeError, AttributeError, LookupError, RecursionError):
            for name in [arg.rpartition("=")[2] for arg in args or ()]:
                if name.endswith((".yaml", ".yml")):
                    read_yaml(Path(name), "config")
            raise

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise instead of printing pages of usage."""
        text = " ".join(str(message).split())
        raise UsageError(f"{shorten(text)}{self._hint(text)}") from ex

    def _hint(self, text: str) -> str:
        if "did you mean" in text:
            return ""
        known = self._known_options()
        for pattern in _UNKNOWN:
            found = pattern.search(text)
            if found:
                name = found["name"]
                whole = nearest(name, known)
                if "did you mean" in whole:
                    return whole
                return nearest(name.rsplit(".", 1)[-1], sorted({option.rsplit(".", 1)[-1] for option in known}))
        found = _CLASS.search(text)
        if found:
            return nearest(found["name"].rsplit(".", 1)[-1], _class_names())
        return ""

    def _known_options(self) -> list[str]:
        from dataclasses import fields, is_dataclass

        actions = list(self._actions)  # type: ignore[attr-defined]
        for action in self._actions:  # type: ignore[attr-defined]
            for parser in (getattr(action, "_name_parser_map", None) or {}).values():  # those of the subcommands
                actions += getattr(parser, "_actions", [])
        names = [action.dest for action in actions if action.dest not in ("help", None)]
        options = {field.name for cls in _component_classes() if is_dataclass(cls) for field in fields(cls)}
        return sorted({*names, *options})


class OneLineParser(_OneLineErrors, ArgumentParser):
    """jsonargparse's parser with one-line errors."""


class OneLineLightningParser(_OneLineErrors, LightningArgumentParser):
    """Lightning's parser with one-line errors."""


def with_component_files(args: Sequence[str], group: str) -> list[str]:
    """Replace ``--GROUP.NAME FILE.yaml`` by the file's content, which jsonargparse does for options but not in dicts.

    Args:
        args: Arguments of a command.
        group: Option whose value is a dict of components, such as ``model.decoders``.

    Returns:
        The arguments, with JSON in place of the files.

    Raises:
        ValueError: If a file is missing or holds no component.
    """
    option = re.compile(rf"--{re.escape(group)}\.[^.=]+")
    expanded, rest = [], list(args)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not equals and option.fullmatch(name) and rest and rest[0].endswith((".yaml", ".yml")):
            equals, value = "=", rest.pop(0)
        if option.fullmatch(name) and value.endswith((".yaml", ".yml")):
            value = json.dumps(_read_component(Path(value), name))
        expanded.append(f"{name}{equals}{value}")
    return expanded


def _read_component(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{name}: expected the YAML file of a component, got {path}, which does not exist.")
    values = read_yaml(path, name)
    if "class_path" not in values:
        raise ValueError(f"{name}: expected a component (class_path and init_args) in {path}, got something else.")
    return values


def _component_classes() -> list[type]:
    """Return all concrete strategies that a config can name."""
    from refusion_lit.data.tokenizers import TokenizerSource
    from refusion_lit.decoding import Decoder
    from refusion_lit.objectives import Objective
    from refusion_lit.tasks import Task

    found: list[type] = []
    waiting: list[Any] = [Decoder, Objective, Task, TokenizerSource]
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        if not getattr(cls, "__abstractmethods__", None):
            found.append(cls)
    return found


def _class_names() -> list[str]:
    return sorted({cls.__name__ for cls in _component_classes()})


def shorten(text: str) -> str:
    """Drop the parser's own prologue and what follows the essential sentence."""
    text = re.sub(r"^Parser key \"([^\"]+)\": ", r"\1: ", text)
    union = _UNION.match(text)
    if union:
        text = f"{union['key'] or ''}{union['first']}"
    return text if len(text) <= 700 else f"{text[:700]} ..."
