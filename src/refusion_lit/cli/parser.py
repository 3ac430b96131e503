"""The parser of all commands: jsonargparse, with errors on one line. It imports no torch, so that help is fast."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from difflib import SequenceMatcher, get_close_matches
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, cast, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from refusion_lit.cli.messages import user_code_location
from refusion_lit.utils.nested import get_nested
from refusion_lit.utils.require import require

PARSER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, SyntaxError, ImportError, NameError)
"""What jsonargparse and PyYAML raise for wrong arguments, damaged files and modules that cannot be imported."""


class PlainHelp(DefaultHelpFormatter):
    """jsonargparse's help without docstring markup and without the modules of our classes."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = re.sub(r":\w+:`~?[\w.]*?(\w+)`", r"\1", super()._expand_help(action)).replace("``", "`")
        text, known, classes = text.partition(", known subclasses: ")
        names = sorted(re.findall(r"refusion_lit[\w.]*\.(\w+)", classes))  # others depend on what is installed
        return f"{text}{known}{', '.join(names)})" if names else f"{text})" if known else text


class OneLineParser(ArgumentParser):
    """jsonargparse's parser with errors on one line.

    jsonargparse makes a parser of the same type for each class that an option takes.
    """

    _class_name = ""  # of the class whose options a parser has

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - jsonargparse's options
        super().__init__(formatter_class=PlainHelp, allow_abbrev=False, **options)

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - jsonargparse's options
        """Add a class's options; keep the class's name for errors, unless the options are a group among others."""
        if nested_key is None:
            first = next(iter(get_args(theclass)), theclass)  # of a union
            self._class_name = getattr(first, "__name__", "")
        added = super().add_class_arguments(theclass, nested_key, *args, **options)
        explain_missing_classes(self)
        return added

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
        self._class_name = ""  # an error in an option of a command names no class
        explain_missing_classes(self)
        try:
            parsed = parse()
        except PARSER_ERRORS as error:
            raise ValueError(explain_error(self, error)) from error
        try:
            return cast("Namespace", self.instantiate_classes(parsed))
        except ValueError as error:
            raise locate(error, {"decoder": parsed.get("decoder")}) from error

    def _refuse_repeated(self, args: Sequence[str]) -> None:
        """Refuse a prompt or a list given twice, because jsonargparse would ignore the first value."""
        names = [arg.partition("=")[0] for arg in args]
        for action in self._actions:
            num_times = names.count(f"--{action.dest}")
            takes_list = "list[" in str(getattr(action, "_typehint", ""))
            if num_times > 1 and (takes_list or action.dest == "prompt"):
                fix = (
                    "write one list, as in '[A, B]'" if takes_list else "put several prompts into a file for --prompts"
                )
                require(False, action.dest, "the option once", f"{num_times} times", fix)


def allow_bare_flags(parser: ArgumentParser) -> None:
    """Accept ``--flag`` for ``--flag true``."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if bool in (hint, *get_args(hint)) and {hint, *get_args(hint)} <= {hint, bool, int, NoneType}:
            action.nargs, action.const = "?", True


def list_config_files(args: Sequence[str]) -> list[Path]:
    """Return the files that ``--config`` and ``-c`` name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", nargs="?", default=[])
    return [Path(path) for path in parser.parse_known_args(args)[0].config if path]


def as_list(value: str | list[str]) -> list[str]:
    """Return the values of an option that takes a text or a list."""
    return [value] if isinstance(value, str) else value


# Errors. jsonargparse refuses wrong options; the functions below make its message one line.

_MIN_SIMILARITY = 0.75
_MAX_LISTED = 20
_UNKNOWN = re.compile(
    r"Option '(.+?)' is not accepted|(?:Subcommand '\w+'|Group '(.+?)') does not accept option '(.+?)'"
    r"|unrecognized arguments: --([^ =]+)"
)
_REPEATED = re.compile(
    r"Expected a path but|Does not validate against|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>"
    r"|Subclass types expect|a class path \(|a dict with|Unable to load config '"
)
"""Lines in which jsonargparse repeats an option's type or value."""
_TYPE = re.compile(r"Expected an? (?:<class '(?P<name>.+?)'>|typing\.Literal\[(?P<choices>.+?)\])")
_CLASS = re.compile(
    r"(?:Expected a dot import path string:|Unexpected import path format:|Not a valid subclass of \w+\. Got value:"
    r"|Expected an import path or a subclass spec, but got) ?(.*)"
)


def explain_error(parser: ArgumentParser, error: Exception) -> str:
    """Return the line of an error of parsing; an error in a user's module has its type and place."""
    if isinstance(error, ValueError):
        return explain(parser, str(error))
    return f"{type(error).__name__}: {error}{user_code_location(error)}"


def explain(parser: ArgumentParser, message: str) -> str:
    """Shorten jsonargparse's message to ``option: reason`` on one line, with the nearest known name.

    The message about an option of a class arrives first, from the parser of the class, and again within the message
    about the option that takes the class.
    """
    if unknown := _UNKNOWN.match(message):
        name = ".".join(filter(None, unknown.groups()))
        known = _option_names(parser)
        owner = f" of {class_name}" if (class_name := getattr(parser, "_class_name", "")) else ""
        return f"unknown option {name!r}{owner}{suggest(name, known) if known else ': the class has no options'}"
    if required := re.search(r"arguments are required: (.+)", message):
        return f"{required[1]}: expected a value, got none; give it on the command line or in a config."
    option = ""
    for key in re.findall(r'Parser key "(.+?)"', message):  # of an option, and of an option in its value
        option = key if f"{key}.".startswith(f"{option}.") or not option else f"{option}.{key}"
    action = next((action for action in parser._actions if action.dest == option), None)
    if entry := re.search(r"NestedArg\(key='(.+?)'", message):  # of a mapping or a class
        option = f"{option}.{entry[1]}"
    message = re.sub(r"argument (?:-\w/)?--(.+?): ", r"\1: ", message)
    lines = [re.sub(r'Parser key ".+?": ?', "", line.strip(" -")) for line in message.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line and not _REPEATED.match(line)]
    types = [line for line in lines if _TYPE.match(line)]
    numbers = [line for line in types if "'int'" in line or "'float'" in line]
    if (match := _CLASS.search(message)) and not numbers:  # a learning rate may also be a class, torch's Tensor
        name = match[1]
        known = _subclasses(action)
        expected = "the name or import path of a class" if known else "options, as NAME: VALUE"
        reason = f"expected {expected}, got {name!r}{suggest(name, known) if known else ''}"
    elif types and (types == lines or match):
        names = [
            (match["choices"] or match["name"]).replace(", ", " or ") for match in map(_TYPE.match, types) if match
        ]
        value = re.search(r"(?:Got|Given) value: (.*)", message)
        reason = f"expected {' or '.join(names)}, got {value[1] if value else ''!r}"
    elif lines and lines[0].startswith("unknown option"):  # further lines are about other classes of the option
        reason = lines[0]
    else:
        reason = " ".join(line for line in lines if line not in types)
        fix = "name the class before its options, and define all abstract methods"
        reason = re.sub(r"Expected an instantiatable class.*", f"expected a class that is not abstract; {fix}", reason)
        reason = re.sub(r"Not a valid subclass of \w+$", "expected options; write them as NAME: VALUE", reason)
        fix = "run in the module's directory with PYTHONPATH=. set, or correct the name"
        reason = re.sub(r"(No module named '.+?').*", rf"\1; {fix}", reason)
        reason = re.sub(
            r"(\w+): ignored explicit argument (.+)", r"\1: expected no value, got \2; write --\1 alone.", reason
        )
        reason = re.sub(r"Import path.* does not correspond to (a subclass of \w+)", r"expected \1", reason)
    inner = re.match(r"([\w.]+): ", reason)
    if option and inner:
        option = option if option.endswith(f".{inner[1]}") else f"{option}.{inner[1]}"
        reason = reason.removeprefix(inner[0])
    return f"{option}: {reason}" if option else reason


def explain_missing_classes(parser: ArgumentParser) -> None:
    """Explain options without their class, which jsonargparse takes for options of the base class and refuses."""
    actions: list[Any] = parser._actions  # jsonargparse checks the value of an option in a method of its action
    for action in actions:
        if hasattr(action, "extra_help") and not hasattr(action._check_type, "__wrapped__"):
            action._check_type = _name_missing_class(action, action._check_type)


def _name_missing_class(action: Any, check: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ANN401 - jsonargparse's
    """Return an option's check whose error names the class that is missing, if a class is."""

    @wraps(check)  # jsonargparse passes the arguments that the signature names
    def checked(value: Any, *, cfg: Namespace | None = None, **options: Any) -> Any:  # noqa: ANN401 - any value of a config
        try:
            return check(value, cfg=cfg, **options)
        except (TypeError, ValueError) as error:
            previous = (cfg.get(action.dest) if cfg else None) or action.default
            if isinstance(previous, list):  # an inner option belongs to the last class in the list
                previous = previous[-1] if hasattr(value, "_fields") else None
            if reason := _find_missing_class(action, _read_value(value), previous):
                raise TypeError(f'Parser key "{action.dest}": {reason}') from error
            raise

    return checked


def _find_missing_class(action: Any, value: Any, previous: Any) -> str | None:  # noqa: ANN401 - values of a config
    """Return the error of a value with options but without their class; ``None`` if no class is missing.

    Args:
        action: An option; options that take a class, a list of classes, or classes by name can have such an error.
        value: The option's value.
        previous: The option's value before, whose class the options may belong to.
    """
    known = _subclasses(action)
    if not known:
        return None
    entries = [("", value, previous)]
    if dict in [get_origin(hint) for hint in (action._typehint, *get_args(action._typehint))]:  # classes by name
        if not isinstance(value, Mapping):
            return f"expected classes by name, got {value!r}; write {{NAME: {value if value in known else 'CLASS'}}}"
        entries = [(f"{name}: ", entry, (previous or {}).get(name)) for name, entry in value.items()]
    elif isinstance(value, list):
        entries = [("", entry, None) for entry in value]
    for label, entry, before in entries:
        if label and not isinstance(entry, str | Mapping | None):
            return f"{label}expected the name or import path of a class, got {entry!r}{suggest('', known)}"
        if not isinstance(entry, Mapping):
            continue
        options = {key: item for key, item in entry.items() if key not in ("class_path", "init_args", "dict_kwargs")}
        name = entry.get("class_path")
        if (name and not options) or (not name and get_nested(before, "class_path")):
            continue
        expected = f"options of {name} under init_args" if name else "class_path beside the class's options"
        name = name or options.pop(next((key for key in options if options[key] in known), None), None)
        example = {"class_path": name or "NAME", "init_args": options | (entry.get("init_args") or {})}
        text = yaml.safe_dump(example, default_flow_style=True, sort_keys=False, width=1 << 20).strip()
        return f"{label}expected {expected}; write {text}{'' if name else suggest('', known)}"
    return None


def _subclasses(action: argparse.Action | None) -> list[str]:
    """Return the names of an option's known classes, from the text of its help."""
    paths = getattr(action, "extra_help", str)().removeprefix(", known subclasses: ").split(", ")
    bases = re.findall(r"\w+", str(getattr(action, "_typehint", "")))
    return [name for name in (path.rpartition(".")[2] for path in paths) if name and name not in bases]


def _read_value(value: Any) -> Any:  # noqa: ANN401 - any value of a config
    """Return a text, a YAML file or jsonargparse's pair of an inner option and its value, as lists and mappings."""
    names, value = (value.key.split("."), value.val) if hasattr(value, "_fields") else ([], value)
    if isinstance(value, str):
        is_file = value.endswith((".yaml", ".yml")) and Path(value).is_file()
        with suppress(yaml.YAMLError):
            value = yaml.safe_load(Path(value).read_text("utf-8") if is_file else value)
    for name in reversed(names):
        value = {name: value}
    return value.as_dict() if isinstance(value, Namespace) else value


def _option_names(parser: ArgumentParser) -> list[str]:
    names = [action.dest for action in parser._actions if "help" not in action.dest.split(".")]
    for action in parser._actions:  # of subcommands
        names += [
            name for subparser in getattr(action, "_name_parser_map", {}).values() for name in _option_names(subparser)
        ]
    return names


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'NAME'?`` for the most similar name, or a short list of all names.

    Last parts are compared (``precision`` is near ``trainer.precision``); the whole name decides between equal parts.
    Then the first part is, unless it names a known group.

    >>> suggest("precison", ["trainer.precision", "model.seed"])
    "; did you mean 'trainer.precision'?"
    >>> suggest("gird.slot_size", ["grid", "base"])
    "; did you mean 'grid'?"
    >>> suggest("model.speed_limit", ["model", "model.seed", "data", "data.seed", "trainer"])
    '; choose one of data, data.seed, model, model.seed, trainer'
    >>> suggest("x", ["model", "data"])
    '; choose one of data, model'
    """
    names = set(known) - {word}
    word = word.lower().replace("-", "_")
    names = sorted(names, key=lambda name: SequenceMatcher(None, word, name.lower()).ratio())
    last_parts = {name.lower().rpartition(".")[2]: name for name in names}
    first_part = word.partition(".")[0]
    for part in (word.rpartition(".")[2], *[first_part] * (first_part not in names)):
        if close := get_close_matches(part, last_parts, n=1, cutoff=_MIN_SIMILARITY):
            return f"; did you mean {last_parts[close[0]]!r}?"
    if not 0 < len(names) <= _MAX_LISTED:
        return "; --help lists them"
    return f"; choose one of {', '.join(sorted(names))}"


def locate(error: ValueError, components: Mapping[str, Any]) -> ValueError:
    """Return an error of a component's ``__post_init__`` with the option that names the component.

    Args:
        error: The error of jsonargparse, which may contain the component's error among others.
        components: Class and options of each component, by the option that names the component.
    """
    from lightning.pytorch.cli import instantiate_class  # imports torch, which only an error may

    for name, component in components.items():
        try:
            if component is not None:
                instantiate_class((), component.as_dict())
        except ValueError as reason:
            if str(reason) in str(error):
                return ValueError(f"{name}.{str(reason).removeprefix('objective.')}")
        except (TypeError, AttributeError):  # a component that needs further arguments
            continue
    return ValueError(explain(ArgumentParser(), str(error)))
