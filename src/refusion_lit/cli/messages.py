"""What the command line says on the terminal: warnings, log lines, and usage errors, each in one line.

jsonargparse parses and refuses. Its messages list every alternative of a type in paragraphs, and name an option within
a config by its last part alone. :func:`explained` finds the option among what was given, and says the same in one line.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TextIO, TypeGuard, get_args, get_origin

import yaml

from refusion_lit.cli.removed import removal_of
from refusion_lit.utils.require import require
from refusion_lit.utils.yaml_files import read_yaml

PARSER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""What a parser raises for wrong arguments; PyYAML lets conversion errors (``!!int x``, 2001-99-99) through."""

_LEAST_SIMILAR = 0.75
_A_CLASS = "the name or import path of a class, or a YAML file"
_WORDS = {
    "<class 'int'>": "an integer",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'NoneType'>": "null",
    "<class 'list'>": 'a list (["a", "b"])',
    "<class 'dict'>": "a mapping",
}
_UNKNOWN = re.compile(r"Option '([^']+)' is not accepted|does not accept option '([^']+)'|arguments: --([\w.+-]+)")
_NO_CLASS = re.compile(
    r"Expected a dot import path string: (.+)|Problem with given class_path '(.+)':\s*(.+)"
    r"|Import path (.+) does not correspond to a subclass of (\w+)"
)
_PACKAGE = str(Path(__file__).parents[1])
_COLOURS = {"warning": "33", "error": "31"}


def show_warnings() -> None:
    """Print each warning of this process once, as one line."""
    shown: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,  # noqa: ARG001
        lineno: int,  # noqa: ARG001
        file: TextIO | None = None,
        line: str | None = None,  # noqa: ARG001
    ) -> None:
        text = " ".join(str(message).split())
        if text in shown or issubclass(category, DeprecationWarning | FutureWarning | PendingDeprecationWarning):
            return
        shown.add(text)
        print_line("warning", text, file)

    warnings.showwarning = show


def print_line(kind: str, text: str, file: TextIO | None = None) -> None:
    """Print a warning or an error; its name is coloured on a terminal.

    Args:
        kind: ``warning`` or ``error``.
        text: What it says.
        file: Where to; standard error by default.
    """
    stream = file or sys.stderr
    name = f"\x1b[{_COLOURS[kind]}m{kind}\x1b[0m" if stream.isatty() else kind
    stream.write(f"refusion-lit: {name}: {text}\n")


def show_own_logs() -> None:
    """Let through what this package logs with Lightning's loggers, and of Lightning's own lines only warnings."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers = [_Lines()]
        logger.propagate = False


class _Lines(logging.Handler):
    """Prints one line a record."""

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if record.levelno >= logging.WARNING:
            print_line("warning", text)
        elif record.pathname.startswith(_PACKAGE):
            sys.stderr.write(f"{text}\n")


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
        if name in ("c", "config"):
            for key, inner in read_yaml(Path(value), "config").items():
                found += _within(key, inner, value)
        else:
            found += _within(name, loaded(value), "")
    return found


def _within(name: str, value: object, file: str) -> Iterator[Given]:
    """Yield an option and those within its value, or within the file that its value names."""
    yield Given(name, value, file)
    if is_yaml_file(value) and Path(value).is_file():
        file, value = value, read_yaml(Path(value), name)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _within(name if key == "init_args" else f"{name}.{key}", inner, file)


def is_yaml_file(value: object) -> TypeGuard[str]:
    """Return whether a value is the name of a YAML file, which may be missing."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def check_groups(parser: Any, given: Iterable[Given]) -> None:  # noqa: ANN401
    """Refuse values in place of a group of options, which jsonargparse drops.

    Raises:
        ValueError: Naming the group.
    """
    groups = {action.dest for action in parser._actions if type(action).__name__ == "_ActionConfigLoad"}
    for each in given:
        holds = each.name not in groups or isinstance(each.value, Mapping | str)
        require(holds, each.where + each.name, "a mapping or a YAML file", each.value, "write options by name below it")


def loaded(value: str) -> Any:  # noqa: ANN401 - any YAML
    """Return what a value on the command line stands for; text if it is no YAML."""
    try:
        return yaml.safe_load(value) if value.strip() else value
    except (yaml.YAMLError, *PARSER_ERRORS):
        return value


def explained(parser: Any, args: Sequence[str], error: Exception, command: str) -> ValueError:  # noqa: ANN401
    """Return the error of one line for arguments that a parser has refused.

    Args:
        parser: The parser of jsonargparse.
        args: The arguments of the command.
        error: What the parser raised.
        command: The command's name.
    """
    message = str(error)
    try:
        given = options_given(args)
    except ValueError as unreadable:
        return unreadable
    refusal = _Refusal(parser, given, message, command)
    unknown, no_class = _UNKNOWN.search(message), _NO_CLASS.search(message)
    required = re.search(r"arguments are required: (.+)", message)
    if required:
        return ValueError(_missing(required[1].replace(f"{command}.", ""), parser))
    if match := re.search(r"argument (?:-\w, )?--(.+?): expected (?:one|at least one) argument", message):
        return ValueError(f"{match[1]}: expected a value, got none; write --{match[1]}=VALUE.")
    if match := re.search(r"unrecognized arguments: (?!--)(\S+)", message):
        return ValueError(
            f"expected options, which start with -- as in --config FILE, got {match[1]!r}; remove it or write --NAME "
            "before it."
        )
    if unknown:
        return ValueError(refusal.of_an_unknown_option(next(filter(None, unknown.groups()))))
    if no_class and not refusal.takes_plain_values:
        return ValueError(refusal.of_a_class(*no_class.groups()))
    if refusal.expected:
        return ValueError(refusal.of_a_value())
    if not isinstance(error, ValueError):
        return ValueError(
            f"expected options that can be parsed, got {type(error).__name__}: {error}; check the config."
        )
    return ValueError(brief(message))


def _missing(names: str, parser: Any) -> str:  # noqa: ANN401
    fix = f"give {'them' if ', ' in names else 'it'}"
    if "config" not in names and any(action.dest == "config" for action in parser._actions):
        fix = f"{fix}, or a config that does, such as `--config configs/quickstart.yaml`"
    return f"{names}: expected a value, got none; {fix}."


class _Refusal:
    """What a message of jsonargparse is about.

    Attributes:
        expected: Types of the innermost option that the message names, as jsonargparse writes them.
    """

    def __init__(self, parser: Any, given: Sequence[Given], message: str, command: str) -> None:  # noqa: ANN401
        self._given, self._message, self._command = given, message, command
        self._actions = {a.dest: a for a in parser._actions if a.option_strings and "help" not in a.dest.split(".")}
        keys = re.findall(r'Parser key "([^"]+)"', message)
        self._outer, self._inner = (keys[0], keys[-1]) if keys else ("", "")
        nested = re.search(r"NestedArg\(key='([^']+)'", message)
        self._path = ".".join(filter(None, (self._outer, nested[1] if nested else "")))
        block = message.rpartition('Parser key "')[2]
        value = re.search(r"(?:Got|Given) value: (.*)", block)
        self._value = "" if value is None else value[1]
        types = re.findall(r"Expected a (.+?)(?=$|\. Got value:)", block[: value.end()] if value else block, re.M)
        self.expected = [name for name in dict.fromkeys(types) if " " not in name or name[0] == "<" or "[" in name]

    @property
    def takes_plain_values(self) -> bool:
        """Whether the option takes numbers or words, and a class besides at most."""
        return any(_WORDS.get(name) in ("an integer", "a number", "true or false") for name in self.expected)

    def of_an_unknown_option(self, name: str) -> str:
        leaf = name.rpartition(".")[2]
        candidates = [
            each for each in self._given if each.name.rpartition(".")[2].replace("-", "_") == leaf.replace("-", "_")
        ]
        if self._path.endswith(f".{leaf}"):
            candidates = [each for each in candidates if each.name == self._path]
        candidates = [each for each in candidates if each.name.endswith(name) and not self._is_known(each.name)]
        option = candidates[-1] if candidates else Given(self._path or name, None)
        reason = removal_of(option.name)
        if reason is not None:
            return f"{option.where}unknown option {option.name!r}: it was removed; {reason}."
        above, known = self._siblings(option.name)
        listing = f"; known are {', '.join(each.removeprefix(f'{above}.') for each in known)}"
        if not above:
            listing = f"; `refusion-lit {self._command} --help` lists them"
        elif not known:
            listing = f": {above} has no options of its own; remove it."
        return f"{option.where}unknown option {option.name!r}{nearest(option.name, known) or listing}"

    def of_a_class(
        self, name: str | None, path: str | None, reason: str | None, other: str | None, base: str | None
    ) -> str:
        got = str(name or path or other)
        candidates = [each for each in self._given if each.value == got and each.name.startswith(self._outer)]
        option = candidates[-1] if candidates else Given(self._path, got)
        above = option.name.removesuffix(".class_path")
        begin = f"{option.where}{above}: expected"
        if is_yaml_file(got):
            return f"{begin} a class or a YAML file, got {got}, which does not exist; correct it."
        if path:
            return (
                f"{begin} a class that can be imported, got {path} ({reason}); install the module or correct its name."
            )
        removed = removal_of(got)
        if removed is not None:
            return f"{begin} {_A_CLASS}, got {got!r}, which was removed; {removed}."
        known = sorted(cls.__name__ for cls in self._classes(above))
        what = f"a subclass of {base}" if base else _A_CLASS
        suggestion = nearest(got, known) or f"; choose one of {', '.join(known)}"
        return f"{begin} {what}, got {got!r}{suggestion}"

    def of_a_value(self) -> str:
        leaf = self._inner.rpartition(".")[2]
        candidates = [
            each
            for each in self._given
            if each.name.startswith(self._outer)
            and each.name.rpartition(".")[2] == leaf
            and str(each.value) == self._value
        ]
        option = candidates[-1] if candidates else Given(self._path or self._inner, self._value)
        words = list(dict.fromkeys(word for name in self.expected for word in _in_words(name)))
        listing = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        default = getattr(self._actions.get(option.name), "default", None)
        shown = isinstance(default, int | float | str) and default not in ("", "==SUPPRESS==")
        example = f", for example {default} (the default)" if shown else ""
        return (
            f"{option.where}{option.name}: expected {listing}, got {option.value!r}; set it to such a value{example}."
        )

    def _is_known(self, name: str) -> bool:
        return name in self._siblings(name)[1]

    def _siblings(self, name: str) -> tuple[str, list[str]]:
        """Return the component that an option belongs to, empty if to none, and the names of the options there."""
        above = name.rpartition(".")[0]
        top = self._action_above(above)
        if top is None:
            return "", list(self._actions)
        chosen = self._chosen(above)
        classes = [cls for cls in self._classes(above) if chosen in (None, cls.__name__)]
        known = dict.fromkeys(each for cls in classes for each in inspect.signature(cls).parameters)
        return above, [f"{above}.{each}" for each in known]

    def _action_above(self, name: str) -> Any:  # noqa: ANN401
        """Return the action of a component that holds a dotted name, if there is one."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            action = self._actions.get(".".join(parts[:count]))
            if action is not None:
                return action if type(action).__name__ == "ActionTypeHint" else None
        return None

    def _chosen(self, name: str) -> str | None:
        """Return the name of the class that a component is of."""
        for each in reversed(self._given):
            if each.name in (name, f"{name}.class_path") and isinstance(each.value, str):
                return each.value.rpartition(".")[2]
        default = getattr(self._actions.get(name), "default", None)
        path = default.get("class_path") if hasattr(default, "get") else None
        return None if path is None else str(path).rpartition(".")[2]

    def _classes(self, name: str) -> list[type]:
        action = self._action_above(name)
        return [] if action is None else [cls for base in bases_of(action._typehint) for cls in concrete_classes(base)]


def _in_words(name: str) -> list[str]:
    if "Literal[" in name:
        return [word.strip(" '") for word in name.partition("[")[2].rstrip("]").split(",")]
    return [_WORDS.get(name, name)]


def bases_of(hint: Any) -> list[type]:  # noqa: ANN401 - a type hint
    """Return the classes of the components that a type hint takes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Callable:
        return bases_of(arguments[-1])
    if arguments:
        return [base for argument in arguments for base in bases_of(argument)]
    return [hint] if inspect.isclass(hint) and hint.__module__ not in ("builtins", "pathlib", "datetime") else []


def concrete_classes(base: type) -> list[type]:
    """Return a class and those that inherit from it, without abstract and private ones."""
    below = [cls for inheriting in base.__subclasses__() for cls in concrete_classes(inheriting)]
    own = [] if inspect.isabstract(base) or base.__name__.startswith("_") else [base]
    return list(dict.fromkeys([*own, *below]))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the known name most similar to a word, or nothing if none is.

    Last parts are compared (``precision`` is near ``trainer.precision``), without regard to case and dashes; of equal
    ones, the whole names are.
    """

    def similarity(name: str) -> tuple[float, float]:
        pairs = [(_plain(word), _plain(name))]
        pairs.insert(0, (pairs[0][0].rpartition(".")[2], pairs[0][1].rpartition(".")[2]))
        return tuple(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    best = max(((similarity(name), name) for name in known), default=((0.0, 0.0), ""))
    return f"; did you mean {best[1]!r}?" if best[0][0] >= _LEAST_SIMILAR else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def brief(message: str) -> str:
    """Return the option and the reason out of the paragraphs of a message of jsonargparse."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    start = lines.index("Errors:") + 1 if "Errors:" in lines else len(lines) - 1
    while lines[start].startswith("Does not validate against") and "Errors:" in lines[start:]:  # a union in a union
        start = lines.index("Errors:", start) + 1
    reason = " ".join(lines[start : start + (2 if lines[start].endswith(":") else 1)])
    is_option = start > 0 and lines[0].startswith("Parser key ")
    return f"{lines[0].removeprefix('Parser key ')} {reason}" if is_option else reason
