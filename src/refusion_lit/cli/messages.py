"""Turns the parser's messages into one line: the option, what was expected, what was got, and the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LONGEST = 700
_NOT_A_FILE = re.compile(r"- Expected a path but \S+ either not accessible or invalid -? ?")
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: .*? Errors: - (?P<errors>.*) "
    r"Given value type: .*? Given value: (?P<got>.*)$"
)
_NESTED = re.compile(r"NestedArg\(key=.*, val=(?P<got>.*)\)")
_NO_TYPE = re.compile(r"Expected a (?P<type><class '[^']+'>|typing\.Literal\[[^]]*\])(?:\. Got value: (?P<got>.*))?$")
_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.*)")
_CLASS = re.compile(r"(?:Unexpected import path format: |No subclass of .* named |Expected a dot import path string: )")
_NOT_FOUND = re.compile(r"Problem with given class_path '(?P<name>[^']+)': (?P<reason>.*)")
_NO_FILE = re.compile(r"Problem with given class_path '(?P<name>[^']+\.ya?ml)': .*")
_NO_SUBCLASS = re.compile(r"Import path (?P<name>\S+) does not correspond to a subclass of (?P<base>\S+)")
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": 'a list (["a", "b"])',
    "dict": "a mapping",
    "NoneType": "null",
}


def readable(text: str) -> str:
    """Rewrite a message of the parser; one that it did not write stays as it is.

    Args:
        text: The message on one line.
    """
    text = re.sub(r"^Parser key \"([^\"]+)\": ", r"\1: ", text)
    key, colon, rest = text.partition(": ")
    if not colon or not re.fullmatch(r"[\w.]+", key):
        return shorten(_required(text))
    rest = _NOT_A_FILE.sub("", rest)
    union = _UNION.match(rest)
    rest = _one_of(re.split(r" - ", union["errors"]), union["got"]) if union else _mistyped(rest)
    return shorten(f"{key}: {rest}")


def shorten(text: str) -> str:
    """Cut a message that nobody would read to its end."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _required(text: str) -> str:
    required = _REQUIRED.match(text)
    if required is None:
        return text
    names = [re.sub(r"^(?:fit|validate|test|predict)\.", "", name) for name in required["names"].split(", ")]
    config = "" if names == required["names"].split(", ") else (
        ", or a config that names them, such as `--config configs/quickstart.yaml` (`refusion-lit init .` writes it)"
    )  # fmt: skip
    return f"{', '.join(names)}: expected a value, got none; give {'it' if len(names) == 1 else 'them'}{config}."


def _one_of(errors: Sequence[str], got: str) -> str:
    """Choose what to say of a value that fits none of several types."""
    types = [_NO_TYPE.match(error) for error in errors]
    telling = [error for error, found in zip(errors, types, strict=True) if found is None]
    if telling:
        return _mistyped(telling[0])
    nested = _NESTED.search(got)
    expected = dict.fromkeys(word for found in types if found is not None for word in _words(found["type"]))
    return f"expected {_joined(list(expected))}, got {_quoted(nested['got'] if nested else got)}."


def _mistyped(text: str) -> str:
    text = _CLASS.sub("expected the name or import path of a class, got ", text)
    text = _NO_FILE.sub(r"expected a class or a YAML file, got \g<name>, which does not exist", text)
    text = _NOT_FOUND.sub(r"expected a class that can be imported, got \g<name> (\g<reason>)", text)
    text = _NO_SUBCLASS.sub(r"expected a subclass of \g<base>, got \g<name>", text)
    found = _NO_TYPE.match(text)
    if found is None or found["got"] is None:
        return text
    return f"expected {_joined(_words(found['type']))}, got {_quoted(found['got'])}."


def _words(written: str) -> list[str]:
    """Name a type as a user would, or the values that it has."""
    if written.startswith("typing.Literal"):
        return written[len("typing.Literal[") : -1].split(", ")
    name = written[len("<class '") : -2]
    return [_TYPES.get(name, name)]


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _quoted(value: str) -> str:
    return repr(value.strip("'\""))
