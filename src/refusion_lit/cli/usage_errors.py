"""Usage errors in one line: the option, what was expected, what was got, and the nearest right name.

jsonargparse parses and refuses. Its messages list every alternative of a type in paragraphs, and name an option within
a config by its last part alone. :func:`explained` finds the option among what was given, and says the same in one line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from refusion_lit.cli.given import MODULE_ERRORS, Given, is_yaml_file, options_given
from refusion_lit.utils.files import read_yaml

_LEAST_SIMILAR = 0.75
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    **dict.fromkeys(("list", "tuple"), 'a list (["a", "b"])'),
    "dict": "a mapping",
}
_OF_ARGPARSE = {
    r"argument (?:-\w/)?--(.+?): expected (?:at least )?one arg": "{0}: expected a value, got none; write --{0}=VALUE.",
    r"Unexpected config:": "config: expected a YAML file, got ''; write --config=FILE.",
    r"argument --(.+?): ignored explicit argument (.+)": "{0}: expected no value, got {1}; write --{0} alone.",
    r"unrecognized arguments: (?!--)(\S+)": (
        "expected options, which start with -- as in --config FILE, got {0!r}; remove it or write --NAME before it."
    ),
}
_UNKNOWN = re.compile(r"(?:Option|accept option) '([^']+)'|unrecognized arguments: --([^ =]+)")
_NO_CLASS = re.compile(
    r"Expected a dot import path string: ?(?P<name>.*)|Problem with given class_path '(?P<path>.+)':\s*(?P<reason>.+)"
    r"|Not a valid subclass of \w+\. Got value: (?P<value>.+)"
    r"|Import path (?P<other>.+) does not correspond to a subclass of (?P<base>\w+)"
)


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
    if found := re.search(r"arguments are required: (.+)", message):
        above = re.match(r'Parser key "(.+?)"', message)  # of a class that lacks an option of its own
        names = found[1].replace(f"{command}.", "")
        return ValueError(_missing(f"{above[1]}.{names}" if above else names, parser))
    for pattern, line in _OF_ARGPARSE.items():
        if found := re.search(pattern, message):
            return ValueError(line.format(*found.groups()))
    refusal = _Refusal(parser, given, message)
    if not _NO_CLASS.search(message) and (problem := refusal.of_an_own_class()):
        return ValueError(problem)
    if (found := re.search(r'Parser key "([^"]+)"', message)) and "is abstract" in message:
        return ValueError(f"{found[1]}: expected a class before its options, got none; give --{found[1]} CLASS first.")
    if found := _UNKNOWN.search(message):
        return ValueError(refusal.of_an_option(found[1] or found[2], command))
    takes_class = refusal.takes_class or {"int", "float", "bool"}.isdisjoint(refusal.expected)
    if (found := _NO_CLASS.search(message)) and takes_class:
        return ValueError(refusal.of_a_class(found))
    if refusal.expected:
        return ValueError(refusal.of_a_value())
    if isinstance(error, MODULE_ERRORS):  # of a module that is imported: no fault of the options
        raise error
    if isinstance(error, ValueError):
        return ValueError(brief(message))
    return ValueError(f"expected options that can be parsed, got {type(error).__name__}: {error}; check the config.")


def _missing(names: str, parser: Any) -> str:  # noqa: ANN401
    if names == "ckpt_path":
        fix = "give one, as in --ckpt_path runs/NAME/VERSION"
        return f"ckpt_path: expected a checkpoint, a run, a directory or a hub id, got none; {fix}."
    fix = f"give {'them' if ', ' in names else 'it'}"
    if "config" not in names and any(action.dest == "config" for action in parser._actions):
        fix = f"{fix}, or a config that does, such as `--config configs/quickstart.yaml`"
    return f"{names}: expected a value, got none; {fix}."


class _Refusal:
    """What a message of jsonargparse is about.

    Attributes:
        expected: Types that the innermost option takes, as jsonargparse writes them.
        takes_class: Whether it takes a class, too.
    """

    def __init__(self, parser: Any, given: Sequence[Given], message: str) -> None:  # noqa: ANN401
        self._given = given
        self._actions = {each.dest: each for each in parser._actions if "help" not in each.dest.split(".")}
        keys = re.findall(r'Parser key "([^"]+)"', message) or [""]
        nested = re.search(r"NestedArg\(key='([^']+)'", message)
        self._top = keys[0]
        self._leaf = _leaf(keys[-1])
        self._path = f"{keys[0]}.{nested[1]}" if nested else keys[0]
        innermost = message.rpartition('Parser key "')[2]
        value = re.search(r"(?:Got|Given) value: (.*)", innermost)
        self._value = value[1] if value else ""
        innermost = innermost[: value.end()] if value else innermost
        types = re.findall(r"Expected a (<.+?>|[\w.]+\[.+?\])(?=$|\. Got value:)", innermost, re.M)
        self.expected = list(dict.fromkeys(name.removeprefix("<class '").removesuffix("'>") for name in types))
        self.takes_class = self._path in self._actions and bool(self._classes(self._path))

    def of_an_option(self, name: str, command: str) -> str:
        """Return the line for an unknown option."""
        same = [each for each in self._given if _leaf(each.name) == _leaf(name) and each.name.endswith(name)]
        unknown = [each for each in same if each.name not in self._siblings(each.name)]
        option = self._chosen_of(unknown, Given(self._path or name, None))
        if reason := removal_of(f"{command}.{option.name}"):
            return f"{option.where}unknown option {option.name!r}: it was removed; {reason}."
        name = self._first_unknown(option.name)
        begin = f"{option.where}unknown option {name!r}"
        known = self._siblings(name)
        above = name.rpartition(".")[0]
        if self._component(above) is None:
            return f"{begin}{nearest(name, known) or f'; `refusion-lit {command} --help` lists them'}"
        none = f": {above} has no options, which are fields of a dataclass; remove it."
        listing = f"; known are {', '.join(map(_leaf, known))}" if known else none
        return f"{begin}{nearest(name, known) or listing}"

    def _first_unknown(self, name: str) -> str:
        """Return the group that holds an unknown option if there is none of its name, else the option."""
        for above in accumulate(name.split(".")[:-1], "{}.{}".format):
            is_known = any(f"{each}.".startswith(f"{above}.") for each in self._actions)
            if not is_known and self._component(above) is None:
                return above
        return name

    def of_a_class(self, found: re.Match[str]) -> str:
        """Return the line for a class that does not exist, or cannot be imported, or is of another kind."""
        got = found["name"] or found["value"] or found["path"] or found["other"] or ""
        option = self._chosen_of([each for each in self._given if str(each.value) == got], Given(self._path, got))
        name = option.name.removesuffix(".class_path")
        begin = f"{option.where}{name}: expected"
        if is_yaml_file(got):
            return f"{begin} a class or a YAML file, got {got}, which does not exist; check the path."
        if reason := removal_of(got):
            return f"{begin} a class that exists, got {got!r}, which was removed; {reason}."
        if reason := found["reason"]:
            fix = "run in its module's directory with PYTHONPATH=., install the module, or correct its name"
            return f"{begin} a class that can be imported, got {got} ({reason}); {fix}."
        base = found["base"] or "object"
        classes = self._classes(name)  # of the option that holds this one, perhaps
        known = sorted({cls.__name__ for cls in classes if base in [above.__name__ for above in cls.__mro__]})
        listing = f"; choose one of {', '.join(known)}" if known else "; name such a class, as in my_module.MyClass"
        what = f"a subclass of {base}" if found["base"] else "the name or import path of a class, or a YAML file"
        return f"{begin} {what}, got {option.value!r}{nearest(got, known) or listing}"

    def of_an_own_class(self) -> str | None:
        """Return the line for an import path of what is no class, or none that can be used; ``None`` if all are."""
        for each in self._given:
            name = each.name.removesuffix(".class_path")
            module, dot, attribute = str(each.value).rpartition(".")
            action = self._component(name)
            bases = () if action is None else tuple(_bases_of(action._typehint))
            if bases and attribute == "py" and name in self._actions:
                fix = f"name it as {Path(module).name}.MyClass, in the file's directory with PYTHONPATH=. set"
                return f"{each.where}{name}: expected the import path of a class, got {each.value!r}; {fix}."
            is_path = dot and bases and re.fullmatch(r"[\w.]+", module) and not is_yaml_file(each.value)
            is_class = name in self._actions or name != each.name or re.fullmatch(r"model\.decoders\.[^.]+", name)
            is_element = _leaf(name).isdigit()  # of a list, whose classes are of another kind than the component
            if not (is_path and (is_class or is_element) and isinstance(each.value, str)):
                continue
            try:
                found = getattr(import_module(module), attribute)
            except (ImportError, AttributeError):  # jsonargparse names these
                continue
            except Exception as error:
                got = f"{each.value} ({type(error).__name__}: {error})"
                return f"{each.where}{name}: expected a class that can be imported, got {got}; mend the module."
            if is_element and not inspect.isclass(found):
                continue
            if not (is_element or (inspect.isclass(found) and issubclass(found, bases))):
                known = " or ".join(base.__name__ for base in bases)
                return f"{each.where}{name}: expected a subclass of {known}, got {each.value!r}; name such a class."
            if inspect.isabstract(found):
                missing = ", ".join(sorted(found.__abstractmethods__))  # pyright: ignore[reportAttributeAccessIssue] - an ABC
                return f"{each.where}{name}: expected a class with {missing}, got {each.value}; define what it lacks."
        return None

    def of_a_value(self) -> str:
        """Return the line for a value of another type."""
        same = [each for each in self._given if _leaf(each.name) == self._leaf and str(each.value) == self._value]
        option = self._chosen_of(same, Given(self._path, self._value))
        words = list(dict.fromkeys(word for name in self.expected for word in _in_words(name)))
        listing = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        default = getattr(self._actions.get(option.name), "default", None)
        is_example = isinstance(default, int | float | str) and default != ""
        begin = f"{option.where}{option.name}: expected {listing}, got {option.value!r}"
        if reason := removal_of(f"{option.name}.{option.value}"):
            return f"{begin}, which was removed; {reason}."
        fix = "set it to such a value" + (f", for example {default} (the default)" if is_example else "")
        return f"{begin}; {fix}."

    def _chosen_of(self, options: Sequence[Given], default: Given) -> Given:
        """Return the last of some options that are below the one that the message names; the exact one if given."""
        below = [each for each in options if each.name.startswith(self._top)]
        exact = [each for each in below if each.name == self._path]
        return [default, *below, *exact][-1]

    def _siblings(self, name: str) -> list[str]:
        """Return the options beside one: those of the component that it belongs to, or of the command."""
        above = name.rpartition(".")[0]
        if self._component(above) is None:
            return list(self._actions)
        default: Any = getattr(self._actions.get(above), "default", None)
        names = [default.get("class_path") if hasattr(default, "get") else None]
        names += [each.value for each in self._given if each.name in (above, f"{above}.class_path")]
        last = [_leaf(name) for name in names if isinstance(name, str)][-1:]
        classes = self._classes(above)
        chosen = [cls for cls in classes if cls.__name__ in last] or classes
        return list(dict.fromkeys(f"{above}.{each}" for cls in chosen for each in inspect.signature(cls).parameters))

    def _component(self, name: str) -> Any:  # noqa: ANN401
        """Return the action of the component at or above a dotted name; ``None`` for names of groups."""
        names = [*accumulate(name.split("."), "{}.{}".format)]
        action = next((self._actions[each] for each in reversed(names) if each in self._actions), None)
        return action if hasattr(action, "_typehint") else None

    def _classes(self, name: str) -> list[type]:
        action = self._component(name)
        if action is None:
            return []
        found = [cls for base in _bases_of(action._typehint) for cls in _concrete(base)]
        for part in name.removeprefix(action.dest).split(".")[1:]:
            owners = [cls for cls in found if part in inspect.signature(cls).parameters]
            if owners:  # an option of the component, such as an objective's likelihood
                hints = [get_type_hints(cls).get(part) for cls in owners]
                found = [cls for hint in hints for base in _bases_of(hint) for cls in _concrete(base)]
        return found


def _in_words(name: str) -> list[str]:
    """Return the values of a type, as jsonargparse writes it, in words."""
    if "Literal[" in name:
        return [word.strip(" '") for word in name.partition("[")[2].rstrip("]").split(",")]
    return [_WORDS.get(name.partition("[")[0], name)]


def _bases_of(hint: Any) -> list[type]:  # noqa: ANN401 - a type hint
    """Return the classes of the components that a type hint takes."""
    arguments = get_args(hint)
    if get_origin(hint) is Callable:
        arguments = arguments[-1:]  # a class that is instantiated later
    if arguments:
        return [base for argument in arguments for base in _bases_of(argument)]
    return [hint] if inspect.isclass(hint) and hint.__module__ not in ("builtins", "pathlib", "datetime") else []


def _concrete(base: type) -> list[type]:
    """Return a class and those that inherit from it, without abstract and private ones."""
    below = [cls for inheriting in base.__subclasses__() for cls in _concrete(inheriting)]
    is_one = not inspect.isabstract(base) and not base.__name__.startswith("_")
    return list(dict.fromkeys([base, *below] if is_one else below))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the known name most similar to a word, or nothing if none is similar.

    Last parts are compared (``precision`` is near ``trainer.precision``), without regard to case and dashes; of equal
    ones, the whole names are.

    Args:
        word: What was given.
        known: Names that exist.
    """
    given = word.lower().replace("-", "_")
    others = (name for name in known if name != word)  # a list's option, which names no element, is known and refused
    by_whole_name = sorted(others, key=lambda name: SequenceMatcher(None, given, name.lower()).ratio())
    leaves = {_leaf(name.lower()): name for name in by_whole_name}  # of equal ones, that of the most similar name
    found = get_close_matches(_leaf(given), leaves, n=1, cutoff=_LEAST_SIMILAR)
    return f"; did you mean {leaves[found[0]]!r}?" if found else ""


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def removal_of(name: str) -> str | None:
    """Return why an option or a class was removed; ``None`` if there never was one of this name.

    Args:
        name: Dotted name of an option, or name or import path of a class.
    """
    parts = re.sub(r"\bdecoders\.[^.]+\.", "decoder.", name).split(".")  # as options of one decoder are named
    return next(filter(None, (removed().get(".".join(parts[start:])) for start in range(len(parts)))), None)


@cache
def removed() -> dict[str, str]:
    """Return what ``removed.yaml`` says of options and classes, by their names."""
    return read_yaml(Path(__file__).with_name("removed.yaml"), "removed")


def located(error: ValueError, components: Mapping[str, Any]) -> str:
    """Return the line of an error; begin it with the component whose own check has raised it, if one has.

    Args:
        error: The error, whose message may begin with an option of a component.
        components: Class and options of each component, by the option that names it.
    """
    from lightning.pytorch.cli import instantiate_class  # takes seconds, which only an error may

    message = brief(str(error))
    option = message.partition(":")[0].rpartition(".")[2]
    for name, component in components.items():
        if component is not None and option in component.get("init_args", ()):
            try:
                instantiate_class((), component.as_dict())
            except ValueError as again:
                if str(again) == message:
                    return f"{name}.{message.removeprefix('objective.')}"
    return message


def brief(message: str) -> str:
    """Return the option and the reason out of the paragraphs of a message of jsonargparse."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    start = lines.index("Errors:") + 1 if "Errors:" in lines else len(lines) - 1
    while lines[start].startswith("Does not validate against") and "Errors:" in lines[start:]:  # a union in a union
        start = lines.index("Errors:", start) + 1
    reason = " ".join(lines[start : start + (2 if lines[start].endswith(":") else 1)])
    is_option = start > 0 and lines[0].startswith("Parser key ")
    return f"{lines[0].removeprefix('Parser key ')} {reason}" if is_option else reason
