"""An argument parser whose errors are one line that names the nearest right option."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from refusion_lit.cli.messages import readable
from refusion_lit.cli.suggestions import nearest
from refusion_lit.utils.yaml_files import read_yaml

_UNKNOWN = (
    re.compile(r"Key '(?P<name>[^']+)' is not expected"),
    re.compile(r"Unrecognized arguments?: --(?P<name>[^\s=]+)", re.IGNORECASE),
    re.compile(r"No action for key \"?'?(?P<name>[\w.]+)"),
    re.compile(r"Group '[^']*' does not accept nested key '(?P<name>[^']+)'"),
    re.compile(r"does not accept (?:nested )?key '(?P<name>[^']+)'"),
    re.compile(r"Option '(?P<name>[^']+)' is not accepted"),
    re.compile(r"does not accept option '(?P<name>[^']+)'"),
)
_CLASS = re.compile(
    r"expected (?:the name or import path of a class|a class that can be imported|a subclass of \S+), "
    r"got (?P<name>[\w.]+)"
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
        text = readable(" ".join(str(message).split()))
        raise UsageError(f"{text}{self._hint(text)}") from ex

    def _hint(self, text: str) -> str:
        if "did you mean" in text:
            return ""
        if re.search(r"unrecognized arguments: [^-]", text, re.IGNORECASE):
            return "; options start with --, as in --config FILE"
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
            return nearest(found["name"].rsplit(".", 1)[-1], self._known_classes(text.partition(":")[0]))
        return ""

    def _known_classes(self, option: str) -> list[str]:
        """Return the names of the classes that an option takes."""
        types = [getattr(action, "_typehint", None) for action in self._all_actions() if action.dest == option]
        names = {cls.__name__ for hint in types for base in _classes_in(hint) for cls in _concrete(base)}
        return sorted(name for name in names if not name.startswith("_"))

    def _all_actions(self) -> list[Any]:
        actions = list(self._actions)  # type: ignore[attr-defined]
        for action in self._actions:  # type: ignore[attr-defined]
            for parser in (getattr(action, "_name_parser_map", None) or {}).values():  # those of the subcommands
                actions += getattr(parser, "_actions", [])
        return actions

    def _known_options(self) -> list[str]:
        from dataclasses import fields, is_dataclass

        names = [action.dest for action in self._all_actions() if action.dest not in ("help", None)]
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

    return [cls for base in (Decoder, Objective, Task, TokenizerSource) for cls in _concrete(base)]


def _concrete(base: type) -> list[type]:
    """Return a class and those that inherit from it, without abstract ones."""
    found: list[type] = []
    waiting: list[Any] = [base]
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        if not inspect.isabstract(cls):
            found.append(cls)
    return found


def _classes_in(hint: Any) -> list[type]:  # noqa: ANN401 - a type hint
    """Return the classes that a type hint is made of, without builtins."""
    arguments = get_args(hint)
    if arguments:
        return [cls for argument in arguments for cls in _classes_in(argument)]
    return [hint] if isinstance(hint, type) and hint.__module__ not in ("builtins", "collections.abc") else []
