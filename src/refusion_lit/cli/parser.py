"""The parser of all commands: jsonargparse, with errors on one line. It imports no torch, so that help is fast."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, cast, get_args

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from refusion_lit.cli.messages import user_code_location
from refusion_lit.utils.require import require

PARSER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, SyntaxError, ImportError, NameError)
"""Errors of jsonargparse and PyYAML: wrong arguments, damaged files, modules that cannot be imported."""


class PlainHelp(DefaultHelpFormatter):
    """jsonargparse's help without docstring markup and without the modules of our classes."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = re.sub(r":\w+:`~?[\w.]*?(\w+)`", r"\1", super()._expand_help(action)).replace("``", "`")
        text, known, classes = text.partition(", known subclasses: ")
        names = sorted(re.findall(r"refusion_lit[\w.]*\.(\w+)", classes))  # others depend on what is installed
        return f"{text}{known}{', '.join(names)})" if names else f"{text})" if known else text


class OneLineParser(ArgumentParser):
    """jsonargparse's parser with errors on one line.

    If an option takes a class, jsonargparse makes a parser of the same type for the class's options.
    """

    _class_name = ""  # of the class whose options a parser has

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - jsonargparse's options
        super().__init__(formatter_class=PlainHelp, allow_abbrev=False, **options)

    def add_class_arguments(self, theclass: type, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - jsonargparse's options
        """Add a class's options; the parser of a class keeps the class's name for errors."""
        if not self.exit_on_error:  # a command's parser exits, and has options of several classes
            self._class_name = getattr(next(iter(get_args(theclass)), theclass), "__name__", "")
        return super().add_class_arguments(theclass, *args, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the error instead of printing it below the usage."""
        raise ValueError(explain(getattr(ex, "subcommand_parser", self), message)) from ex

    def parse(self, args: Sequence[str]) -> Namespace:
        """Parse arguments and create the components that they name.

        Raises:
            ValueError: If an option is unknown, given twice or has a wrong value.
        """
        allow_bare_flags(self)
        self._refuse_repeated(args)
        return self._create(lambda: self.parse_args(args))

    def parse_values(self, values: Mapping[str, Any]) -> Namespace:
        """Check a file's values and create the components that they name; see :meth:`parse`."""
        return self._create(lambda: self.parse_object(deepcopy(dict(values))))

    def _create(self, parse: Callable[[], Namespace]) -> Namespace:
        try:
            parsed = parse()
        except PARSER_ERRORS as error:
            raise ValueError(explain_error(error)) from error
        try:
            return cast("Namespace", self.instantiate_classes(parsed))
        except ValueError as error:
            raise locate(error, {"decoder": parsed.get("decoder")}) from error

    def _refuse_repeated(self, args: Sequence[str]) -> None:
        """Refuse a prompt or a list that is given twice: jsonargparse would ignore the first value."""
        names = [arg.partition("=")[0] for arg in args]
        fixes = {"prompt": "put several prompts into a file for --prompts"}
        lists = [action.dest for action in self._actions if "list[" in str(getattr(action, "_typehint", ""))]
        for name, fix in (dict.fromkeys(lists, "write one list, as in '[A, B]'") | fixes).items():
            num_times = names.count(f"--{name}")
            require(num_times < 2, name, "the option once", f"{num_times} times", fix)


def allow_bare_flags(parser: ArgumentParser) -> None:
    """Accept ``--flag`` for ``--flag true``."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if bool in (hint, *get_args(hint)) and {hint, *get_args(hint)} <= {hint, bool, int, NoneType}:
            action.nargs, action.const = "?", True


def list_config_files(args: Sequence[str]) -> list[Path]:
    """Return the files given with ``--config`` and ``-c``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", nargs="?", default=[])
    return [Path(path) for path in parser.parse_known_args(args)[0].config if path]


def as_list(value: str | list[str]) -> list[str]:
    """Return the values of an option whose value is a text or a list."""
    return [value] if isinstance(value, str) else value


def explain_error(error: Exception) -> str:
    """Return a parsing error as one line. An error in a user's module gets its type and place."""
    if isinstance(error, ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}{user_code_location(error)}"


# Errors. jsonargparse refuses wrong options; the functions below put its message on one line with the nearest name.

_UNKNOWN = re.compile(
    r"Option '(.+?)' is not accepted|(?:Subcommand '\w+'|Group '(.+?)') does not accept option '(.+?)'"
    r"|unrecognized arguments: --([^ =]+)"
)
_REPEATED = re.compile(
    r"Expected a path but|Does not validate|Subtypes:|Errors:|Given value|Subclass types expect|a class path \("
    r"|Expected a <class '(?:NoneType|collections)|a dict with|Unable to load config '"
)
"""Lines in which jsonargparse repeats an option's type or value."""
_CLASS = re.compile(
    r"(?:^|; )(?:Expected a dot import path string|Unexpected import path format|Not a valid subclass|Import path"
    r"|Expected an instantiatable class|unknown option '\w+'(?: of (?P<owner>\w+))?[;:]).*?(?:: (?P<name>\S+))?$"
)
"""Errors whose fix is a class name. An unknown option of a base class means that its class was not given."""


def explain(parser: ArgumentParser, message: str) -> str:
    """Return jsonargparse's message as ``option: reason`` on one line, with the nearest known name.

    A wrong option of a class is reported twice: by the class's parser, and then as a line in the message about the
    option that takes the class.
    """
    if unknown := _UNKNOWN.match(message):
        name, owner = ".".join(filter(None, unknown.groups())), getattr(parser, "_class_name", "")
        names = [action.dest for action in parser._actions if "help" not in action.dest.split(".")]
        nearest = suggest(name, names) if names else ": the class has no options"
        return f"unknown option {name!r}{f' of {owner}' if owner else ''}{nearest}"
    message = re.sub(r"^argument (?:-\w/)?--(.+?): ", r"\1: ", message)
    key = re.match(r'Parser key "(.+?)"', message)
    option = ".".join(match[1] for match in (key, re.search(r"NestedArg\(key='(.+?)'", message)) if match)
    lines = [re.sub(r'Parser key ".+?": ?', "", line.strip(" -")) for line in message.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line and not _REPEATED.match(line)]
    is_whole = lines[:1] and lines[0].startswith("unknown")  # the other lines are about classes tried first
    text = lines[0] if is_whole else "; ".join(lines).replace(":;", ":")
    value = re.search(r"Given value: (?!NestedArg|Namespace|[{\[])(.+)", message)
    if value and not text.endswith(f": {value[1]}"):
        text += f". Got value: {value[1]}"
    action: Any = next((action for action in parser._actions if key and action.dest == key[1]), None)
    hint, error = str(getattr(action, "_typehint", "")), _CLASS.search(text)
    classes = re.findall(r"\.(\w+)(?=,|$)", getattr(action, "extra_help", str)())  # the known subclasses in its help
    classes = [name for name in classes if not re.search(rf"\b{name}\b", hint)]
    takes_class = classes and not re.search(r"\bfloat\b", text)  # a learning rate may also be a class, torch's Tensor
    if takes_class and error and re.search(rf"\b{error['owner'] or ''}\b", hint):
        nearest = suggest(error["name"] or "", classes)
        form = "" if "did you mean" in nearest else "; write {class_path: NAME, init_args: {OPTION: VALUE}}"
        text += form + nearest
    elif "No module named" in text:
        text += "; set PYTHONPATH=. in the module's directory, or correct the name"
    text = re.sub(r"Expected an? <class '(?:\w+\.)*(\w+)'>", r"expected \1", text)
    text = re.sub(r"Expected a typing\.Literal\[(.+?)\]", r"expected one of \1", text)
    text = text.removeprefix(option.rpartition(".")[2] + ": ")
    return f"{option}: {text}" if option else text


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'NAME'?`` for the most similar name, or a short list of all names.

    The last part of a known name counts as a name, too. A word is compared by its last part, or by its first part if no
    group has that name.

    >>> suggest("precison", ["trainer.precision", "model.seed"])
    "; did you mean 'trainer.precision'?"
    >>> suggest("x", ["model", "data"])
    '; choose one of data, model'
    """
    names = sorted({*known} - {word})
    parts = {name.lower().rpartition(".")[2]: name for name in names} | {name.lower(): name for name in names}
    word = word.lower().replace("-", "_")
    first, last = word.partition(".")[0], word.rpartition(".")[2]
    for part in (word, last, *[first] * (first not in names)):
        if close := get_close_matches(part, parts, n=1, cutoff=0.75):
            return f"; did you mean {parts[close[0]]!r}?"
    return f"; choose one of {', '.join(names)}" if 0 < len(names) <= 20 else "; --help lists them"


def locate(error: ValueError, components: Mapping[str, Any]) -> ValueError:
    """Return the error of creating classes. If a component in ``components`` (by option) causes it, name the option."""
    from lightning.pytorch.cli import instantiate_class  # imports torch, which only an error may

    for name, component in components.items():
        with suppress(TypeError, AttributeError):  # None, or a component that needs further arguments
            try:
                instantiate_class((), component.as_dict())
            except ValueError as reason:
                return ValueError(f"{name}.{str(reason).removeprefix('objective.')}")
    return ValueError(explain(ArgumentParser(), str(error)))
