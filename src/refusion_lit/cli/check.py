"""Checks names and values of arguments and config files against a command's description, without heavy imports.

Values are checked loosely: every value that the command's own parser might accept passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.cli.description import Description, Option, Options, describe
from refusion_lit.cli.suggestions import nearest
from refusion_lit.utils.yaml_files import read_yaml

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "null": "null",
    "list": 'a list (["a", "b"])',
    "dict": "a mapping",
    "group": "a mapping or a YAML file",
    "component": "the name or import path of a class, or a YAML file",
    "components": "components by name, or a list of them",
}
_UNCHECKED = Option()


def check_arguments(args: Sequence[str], description: Description, command: str) -> None:
    """Refuse arguments that a command cannot take.

    Args:
        args: The command's arguments.
        description: Its options.
        command: Its name, for messages.

    Raises:
        ValueError: Naming the first wrong option, what was expected and what was got.
    """
    _Checker(description, command).check(args)


def check_config(values: Mapping[str, Any], description: Description, command: str) -> None:
    """Refuse a config that a command cannot take; options may be missing.

    Args:
        values: The config, in groups or with dotted names.
        description: The command's options.
        command: Its name, for messages.

    Raises:
        ValueError: Naming the first wrong option.
    """
    _Checker(description, command).config(values, "")


def explain(parser: Any, args: Sequence[str], error: Exception, command: str = "") -> ValueError:  # noqa: ANN401
    """Return the error for arguments that a parser has refused: ours if it is found here, else the parser's own.

    Args:
        parser: The parser, with the classes of all options imported.
        args: The arguments.
        error: What it raised.
        command: Name of the command; the last word of the parser's ``prog`` by default.
    """
    try:
        check_arguments(args, describe(parser), command or str(parser.prog).rpartition(" ")[2])
    except ValueError as found:
        return found
    if type(error) is ValueError:
        return error
    return ValueError(f"expected options that can be parsed, got {type(error).__name__}: {error}; check the config.")


class _Checker:
    """Checks one command line; remembers which components it names, as their options depend on it."""

    def __init__(self, description: Description, command: str) -> None:
        self._options, self._components, self._command = description.options, description.components, command
        self._classes: dict[str, str] = {}
        self._given: set[str] = set()

    def check(self, args: Sequence[str]) -> None:
        pairs = list(self._pairs(args))
        for name, value in pairs:
            if name == "config" and "config" in self._option(name, "").kinds:
                self.config(read_yaml(Path(value), "config"), f"{value}: ")
        # A component comes before its options, which may be given first.
        for name, value in sorted(pairs, key=lambda pair: pair[0].count(".")):
            self._check(name, self._option(name, ""), value, "")
        missing = [name for name, option in self._options.items() if option.required and name not in self._given]
        if missing:
            fix = f"give {'it' if len(missing) == 1 else 'them'}"
            if "config" in self._options and "config" not in missing:
                fix = f"{fix}, or a config that does, such as `--config configs/quickstart.yaml`"
            raise ValueError(f"{', '.join(missing)}: expected a value, got none; {fix}.")

    def _pairs(self, args: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Split arguments into names and values."""
        positional = [name for name, option in self._options.items() if option.positional]
        waiting = list(args)
        while waiting:
            word = waiting.pop(0)
            if not word.startswith("--") and word != "-c":
                if not positional:
                    raise ValueError(
                        f"expected options, which start with -- as in --config FILE, got {word!r}; remove it or write "
                        "--NAME before it."
                    )
                yield positional[0], word
                continue
            name, equals, value = word.partition("=")
            name = "config" if name == "-c" else name[2:].removesuffix("+")
            option = self._options.get(name)
            if option is not None and option.flag:
                self._given.add(name)
                continue
            if not equals:
                if not waiting or waiting[0].startswith("--"):
                    self._option(name, "")
                    example = "true" if option is not None and "bool" in option.kinds else "VALUE"
                    raise ValueError(f"{name}: expected a value, got none; write --{name} {example}.")
                value = waiting.pop(0)
            yield name, value if option is not None and option.kinds == ("str",) else loaded(value)

    def config(self, values: Mapping[str, Any], where: str) -> None:
        for name, value in values.items():
            self._check(name, self._option(name, where), value, where)

    def _option(self, name: str, where: str) -> Option:
        """Return the option that a dotted name stands for; one of any kind where nothing is known of it.

        Raises:
            ValueError: If there is none.
        """
        return self._find(name, "", self._options, where)

    def _find(self, name: str, above: str, options: Options, where: str) -> Option:
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            head, rest = ".".join(parts[:count]), parts[count:]
            if head in options and not (rest and "group" in options[head].kinds):
                return self._below(f"{above}{head}", options[head], rest, where)
        if any(known.startswith(f"{name}.") for known in options):
            return Option(kinds=("group",))
        listing = f"known are {', '.join(options)}" if above else f"`refusion-lit {self._command} --help` lists them"
        suggestion = nearest(above + name, [above + known for known in options]) or f"; {listing}"
        raise ValueError(f"{where}unknown option {above + name!r}{suggestion}")

    def _below(self, name: str, option: Option, rest: list[str], where: str) -> Option:
        """Return the option at the end of a path that starts at another one."""
        if not rest:
            return option
        if "components" in option.kinds:
            one = Option(kinds=("component", "null"), base=option.base)
            return self._below(f"{name}.{rest[0]}", one, rest[1:], where)
        if "component" not in option.kinds:
            if {"any", "dict"} & {*option.kinds}:
                return _UNCHECKED
            raise ValueError(
                f"{where}unknown option {'.'.join([name, *rest])!r}: {name} has no options of its own; remove it."
            )
        if rest == ["class_path"]:
            return Option(kinds=("component",), base=option.base)
        if rest[0] in ("class_path", "dict_kwargs"):
            return _UNCHECKED
        rest = rest[1:] if rest[0] == "init_args" else rest
        known = self._known(option)
        chosen = self._classes.get(name, option.default)
        options: Options | None
        if chosen is None:  # any of the classes, which an earlier config may name
            options = {key: value for each in known.values() for key, value in (each or {}).items()}
        else:
            options = known.get(chosen)
        return _UNCHECKED if options is None or not rest else self._find(".".join(rest), f"{name}.", options, where)

    def _known(self, option: Option) -> Mapping[str, Options | None]:
        base = option.base
        return {} if base is None else self._components[base]

    def _check(self, name: str, option: Option, value: Any, where: str) -> None:  # noqa: ANN401 - any YAML
        """Refuse a value that an option cannot take."""
        parts = name.split(".")
        self._given.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
        if option.kinds == ("config",) or "any" in option.kinds:
            return
        if "group" in option.kinds and isinstance(value, dict):
            for key, inner in value.items():
                self._check(f"{name}.{key}", self._option(f"{name}.{key}", where), inner, where)
        elif "components" in option.kinds and isinstance(value, dict | list) and "class_path" not in value:
            items = value.items() if isinstance(value, dict) else ((str(i), item) for i, item in enumerate(value))
            one = Option(kinds=("component", "null"), base=option.base)
            for key, inner in items:
                self._check(f"{name}.{key}", one, inner, where)
        elif {"component", "components"} & {*option.kinds} and isinstance(value, dict | str):
            self._component(name, option, value, where)
        elif not _takes(option, value):
            words = [*dict.fromkeys(map(str, option.choices)), *(_WORDS[kind] for kind in option.kinds)]
            expected = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
            raise ValueError(f"{where}{name}: expected {expected}, got {value!r}; {_fix(option)}.")

    def _component(self, name: str, option: Option, value: Any, where: str) -> None:  # noqa: ANN401
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            if not Path(value).is_file():
                raise ValueError(
                    f"{where}{name}: expected a class or a YAML file, got {value}, which does not exist; correct it."
                )
            self._check(name, option, read_yaml(Path(value), name), f"{value}: ")
            return
        if isinstance(value, str):
            self._choose(name, option, value, where)
            return
        if "class_path" in value:
            self._choose(name, option, str(value["class_path"]), where)
            value = value.get("init_args") or {}
        for key, inner in (value.get("init_args") or value).items():
            self._check(f"{name}.{key}", self._option(f"{name}.{key}", where), inner, where)

    def _choose(self, name: str, option: Option, path: str, where: str) -> None:
        """Remember the class of a component; refuse one that does not exist."""
        known = self._known(option)
        package, _, cls = path.rpartition(".")
        name = name.removesuffix(".class_path")
        self._classes[name] = cls
        if (cls in known and package.partition(".")[0] in ("", "refusion_lit")) or "str" in option.kinds or not known:
            return
        if not package:
            suggestion = nearest(cls, known) or f"; choose one of {', '.join(known)}"
            raise ValueError(f"{where}{name}: expected {_WORDS['component']}, got {path!r}{suggestion}")
        self._classes[name] = path  # a class of another package: its options are unknown
        if find_spec(package.partition(".")[0]) is None:
            top = package.partition(".")[0]
            raise ValueError(
                f"{where}{name}: expected a class that can be imported, got {path} (no module {top!r}); install the "
                "module or correct its name."
            )


def loaded(value: str) -> Any:  # noqa: ANN401 - any YAML
    """Return what a value on the command line stands for; text if it is no YAML."""
    try:
        return yaml.safe_load(value) if value.strip() else value
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return value


def _fix(option: Option) -> str:
    """Return what to do about a wrong value, with the default as the example of a right one."""
    default = option.default
    if default in (None, "") or not isinstance(default, str | int | float) or not _takes(option, default):
        return "set it to such a value"
    return f"set it to such a value, for example {json.dumps(default)} (the default)"


def _takes(option: Option, value: Any) -> bool:  # noqa: ANN401
    kinds = {*option.kinds}
    if str(value) in map(str, option.choices):
        return True
    if isinstance(value, dict):
        return bool(kinds & {"dict", "component", "components", "group"})
    if isinstance(value, list):
        return bool(kinds & {"list", "components"})
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "bool") in kinds
    if "str" in kinds or (isinstance(value, str) and "group" in kinds):
        return True
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return "float" in kinds or ("int" in kinds and number == number // 1)
