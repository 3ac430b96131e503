"""A command's options as plain values: what its help shows, and what names and values are checked against."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_SPECIAL = {"_ActionConfigLoad": "group", "ActionConfigFile": "config", "_ActionPrintConfig": "any"}
_SCALARS = {int: "int", float: "float", bool: "bool", str: "str", NoneType: "null"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a command or of a component.

    Attributes:
        kinds: Kinds of values that it takes: ``int``, ``float``, ``bool``, ``str``, ``null``, ``list``, ``dict``,
            ``config`` (a YAML file of options), ``group`` (a file with the options below this name), ``component`` (a
            class with its options), ``components`` (several, in a list or by name), or ``any``, which is not checked.
        choices: Literal values that it takes besides.
        base: Name of a component's base class.
        default: Its default, a component's by the name of its class.
        help: What it does.
        required: Whether it must be given.
        flag: Whether it takes no value.
        positional: Whether it is given without its name.
    """

    kinds: tuple[str, ...] = ("any",)
    choices: tuple[Any, ...] = ()
    base: str | None = None
    default: Any = None
    help: str = ""
    required: bool = False
    flag: bool = False
    positional: bool = False


Options = Mapping[str, Option]


@dataclass(frozen=True)
class Description:
    """The options of a command.

    Attributes:
        options: Options by dotted name, without leading dashes.
        components: Options of each component class, by base class and class name; ``None`` where they are not known.
    """

    options: Options
    components: Mapping[str, Mapping[str, Options | None]]


def describe(parser: Any) -> Description:  # noqa: ANN401 - a parser of jsonargparse or Lightning
    """Describe the options of a parser, with all classes that are imported for them."""
    bases = _Bases()
    return Description(_options_of(parser, bases), bases)


class _Bases(dict[str, Mapping[str, Options | None]]):
    """Component classes by base class, described when they are first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, type] = {}

    def __missing__(self, name: str) -> Mapping[str, Options | None]:
        classes = concrete_classes(self.known[name])
        self[name] = {cls.__name__: self._options_of(cls) for cls in classes}
        return self[name]

    def _options_of(self, cls: type) -> Options | None:
        from jsonargparse import ArgumentParser

        parser = ArgumentParser()
        try:
            parser.add_class_arguments(cls, fail_untyped=False)
        except Exception:
            return None
        return _options_of(parser, self)


def _options_of(parser: Any, bases: _Bases) -> Options:  # noqa: ANN401
    found = {}
    for action in parser._actions:
        strings, kind = action.option_strings, type(action).__name__
        if action.dest == "help" or action.dest.endswith(".help") or " --> " in "".join(strings):
            continue
        if kind in _SPECIAL:
            values: dict[str, Any] = {"kinds": (_SPECIAL[kind],)}
        else:
            values = _kinds(getattr(action, "_typehint", None) or action.type or Any, bases)
        found[action.dest] = Option(
            **values,
            flag=action.nargs == 0 or kind == "_ActionPrintConfig",
            default=_plain_default(action.default),
            help="" if action.help == "==SUPPRESS==" else " ".join((action.help or "").split()),
            required=bool(action.required) or (not strings and action.nargs != "?"),
            positional=not strings,
        )
    return found


def _kinds(hint: Any, bases: _Bases) -> dict[str, Any]:  # noqa: ANN401 - a type hint
    """Return kinds, choices and base of the values that a type hint allows."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {"kinds": ("any",)}
    if hint in _SCALARS:
        return {"kinds": (_SCALARS[hint],)}
    if origin is Literal:
        return {"kinds": (), "choices": arguments}
    if origin in (Union, UnionType):
        parts = [_kinds(argument, bases) for argument in arguments]
        if any({"int", "float"} & {*part["kinds"]} for part in parts):
            parts = [part for part in parts if not part.get("base")]  # a tensor in place of a number is for programs
        return {
            "kinds": tuple(dict.fromkeys(kind for part in parts for kind in part["kinds"])),
            "choices": tuple(choice for part in parts for choice in part.get("choices", ())),
            "base": next((part["base"] for part in parts if part.get("base")), None),
        }
    if inspect.isclass(origin) and issubclass(origin, Mapping | list | tuple):
        values = [argument for argument in arguments if argument is not ...]
        inner = _kinds(values[-1], bases) if values else {}
        if inner.get("base"):
            return {"kinds": ("components",), "base": inner["base"]}
        return {"kinds": ("dict" if issubclass(origin, Mapping) else "list",)}
    if str(origin) == "<class 'collections.abc.Callable'>" and arguments:
        return _kinds(arguments[-1], bases)  # a class that is instantiated later
    if inspect.isclass(hint) and hint.__module__.partition(".")[0] not in ("builtins", "datetime", "pathlib"):
        bases.known[hint.__name__] = hint
        return {"kinds": ("component",), "base": hint.__name__}
    return {"kinds": ("any",)}


def concrete_classes(base: type) -> list[type]:
    """Return a class and those that inherit from it, without abstract and private ones."""
    found: list[type] = []
    waiting: list[Any] = [base]
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            found.append(cls)
    return sorted(found, key=lambda cls: cls.__name__)


def _plain_default(value: Any) -> Any:  # noqa: ANN401
    """Return a default as JSON; a component's is the name of its class."""
    if isinstance(value, str):
        return None if value == "==SUPPRESS==" else value
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain_default(item) for item in value]
    if isinstance(value, dict) and "class_path" not in value:
        return {key: _plain_default(item) for key, item in value.items()}
    name = value["class_path"] if isinstance(value, dict) else getattr(value, "class_path", type(value).__name__)
    return str(name).rpartition(".")[2]
