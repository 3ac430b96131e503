"""Strict JSON schemas, which llguidance guarantees exactly.

llguidance reads some keywords more loosely than JSON schema defines them, and engines disagree about others. A strict
schema tightens these keywords, so that every value it allows is also allowed by the user's schema. Keywords that
cannot be tightened are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal
from numbers import Integral, Real
from typing import Any

from refusion_lit.constraints.schema_structure import OPTION, VALUES
from refusion_lit.utils.require import OptionError, is_number

_BOUNDS = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LAST = (*VALUES, "allOf", "anyOf", "oneOf", "$ref")
"""Keywords that come last in a strict schema: llguidance reads the keywords before and after them separately."""
_IGNORED = ("default", "examples")
"""Keywords that constrain nothing and may hold any value."""
EXACT = Context(prec=15, Emin=-8)
"""Decimal precision at which all parsers read the same floats, from 1e-22 on."""
_AMBIGUOUS = re.compile(r"\\[DW]|\[\^[^]]*\\|\[\^?]?[^]]*(\[|&&|--|~~)|\(\?[^:=!<]")
"""Patterns that engines read differently; escapes other than ``\\d``, ``\\D``, ``\\w``, ``\\W`` are removed first."""
_CONTROL = re.compile("[\\x00-\\x07\\x0b\\x0e-\\x1f\\x7f]")
"""Characters that a grammar's strings cannot have, as JSON has no short escapes for them."""
_CODE = r"\\(x|u00)"
_CONTROL_IN_PATTERN = re.compile(rf"{_CODE}(0[0-7bBeEfF]|1.|7[fF])|\\[v0]|{_CONTROL.pattern}")
_WIDE = re.compile(
    rf"\[\^(\\.|[^]\\])*\]|(\\[v0]|{_CODE}..|[\x00-~])-({_CODE}(7[eEfF]|[89a-fA-F].)|\\u(?!00)....|[~-\U0010ffff])"
)
"""Pattern parts that also allow other characters: negated classes, and ranges beyond ``}``."""
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LABEL = "[a-zA-Z0-9-]{1,63}"
_FORMAT_KEYWORDS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}"},
    "time": {"pattern": f"^{_TIME}"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}"},
    "email": {"pattern": rf"^[^@]{{1,64}}@({_LABEL}\.)*{_LABEL}$", "maxLength": 254},
    "hostname": {"maxLength": 253},
}
"""Keywords that tighten a format. llguidance alone allows 29 February in every year, the year 0, second 60 in every
minute, and host names that are too long."""
_STRING_KEYWORDS = ("pattern", "minLength", "maxLength")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value maps names, which are not keywords, to schemas."""


def make_strict(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema that llguidance guarantees exactly and that implies the given schema.

    Raises:
        ValueError: If there is no such schema.
    """
    if not isinstance(schema, Mapping):
        return [make_strict(item) for item in schema] if isinstance(schema, list | tuple) else schema
    strict: dict[str, Any] = {}
    for keyword in sorted(schema, key=_LAST.__contains__):
        value = schema[keyword]
        for is_valid, expected, got in _check_keyword(keyword, value, schema):
            if not is_valid:
                message = f"{OPTION}: {keyword}: expected {expected}, got {got!r}; correct it, or leave it out."
                raise OptionError(message, OPTION)
        if keyword in _NAMED and isinstance(value, Mapping):
            strict[keyword] = {name: make_strict(item) for name, item in value.items()}
        elif keyword not in _IGNORED:
            strict[keyword] = value if keyword in VALUES else make_strict(value)
    # Exclusive bounds become inclusive. Parsers may round a number just beyond the bound to the bound itself, so the
    # inclusive bound is the next number that all parsers read exactly.
    for inclusive, tighter, next_number in (("minimum", max, EXACT.next_plus), ("maximum", min, EXACT.next_minus)):
        bound = strict.pop(f"exclusive{inclusive.title()}", False)
        bound = strict.get(inclusive, False) if bound is True else bound  # draft 4 has booleans
        if bound is not False:
            end = float(next_number(EXACT.create_decimal(repr(float(bound)))))
            strict[inclusive] = tighter(end, strict.get(inclusive, end))
    more = _FORMAT_KEYWORDS.get(str(strict.get("format")))
    if more and isinstance(strict.get("allOf", []), list):
        strict["allOf"] = [more, *strict.get("allOf", [])]
    if not isinstance(strict.get("items"), list):
        strict.pop("additionalItems", None)  # meaningless here, but llguidance would skip prefixItems
    return _drop_unwritable(strict)


def _drop_unwritable(strict: dict[str, Any]) -> Any:  # noqa: ANN401 - a schema is an object or a boolean
    """Return a schema without the listed values that cannot be written; ``False`` if no value is left."""
    listed = [strict["const"]] if "const" in strict else strict.get("enum")
    if not listed or not isinstance(listed, list | tuple):
        return strict
    writable = [value for value in listed if _is_writable(value)]
    if "enum" in strict and "const" not in strict:
        strict["enum"] = writable
    return strict if writable else False


def _is_writable(value: object) -> bool:
    """Return whether llguidance writes a value as it is; it drops control characters in strings."""
    if isinstance(value, str):
        return not _CONTROL.search(value)
    if isinstance(value, Mapping):
        return all(map(_is_writable, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_writable, value))


def list_patterns(schema: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - any JSON value
    """Yield a strict schema's string schemas with a pattern, and its patterns for property names as schemas."""
    if isinstance(schema, Mapping):
        if (string := _keep_string(schema)) is not None:
            yield string
        names = schema.get("patternProperties")
        yield from ({"pattern": name} for name in (names if isinstance(names, Mapping) else ()))
        for keyword, value in schema.items():
            yield from list_patterns(value) if keyword not in VALUES else ()
    elif isinstance(schema, list | tuple):
        for item in schema:
            yield from list_patterns(item)


def _keep_string(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the string keywords in a schema and its ``allOf``; ``None`` if they have no pattern."""
    kept = {keyword: schema[keyword] for keyword in _STRING_KEYWORDS if keyword in schema}
    parts = schema.get("allOf")
    mappings = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    kept["allOf"] = [part for part in map(_keep_string, mappings) if part is not None]
    return kept if kept["allOf"] or isinstance(kept.get("pattern"), str) else None


def _check_keyword(
    keyword: str,
    value: Any,  # noqa: ANN401
    schema: Mapping[str, Any],
) -> Iterator[tuple[bool, str, object]]:
    """Yield checks for a keyword's value: whether the value passes, what is expected, and the value.

    A check may rely on the checks before it, so the caller stops at the first failure.
    """
    if keyword == "x-guidance" or (keyword == "$schema" and "/draft-03/" in str(value)):
        yield False, "draft 4 or later, without options of llguidance", value
    elif keyword in _BOUNDS or (keyword in _EXCLUSIVE and not isinstance(value, bool)):
        yield is_number(value, Real), "a number", value
        number = _to_float(value)
        yield math.isfinite(number), "a finite number of 64 bits", number
        yield keyword != "multipleOf" or isinstance(value, Integral), "an integer, as floats are rounded", value
    elif keyword in _SIZES:
        number = _to_float(value) if is_number(value, Real) else -1.0
        is_size = 0 <= number < math.inf and number.is_integer()
        yield is_size, "an integer of at least 0", value if math.isfinite(number) else number
        if keyword == "minProperties":
            # llguidance counts a name that is written twice as two properties. It never repeats a required name, so
            # that required names and one more name differ.
            names = schema.get("required")
            most = 1 + len({*map(str, names)} if isinstance(names, list | tuple) else ())
            yield number <= most, f"at most {most}: required names and one more", value
    elif keyword == "format":
        yield value != "unknown", "a format that JSON schema defines", value  # llguidance ignores it
    elif keyword in ("pattern", "patternProperties"):
        for pattern in value if isinstance(value, Mapping) else [value]:
            yield from _check_pattern(str(pattern))
    elif keyword in VALUES:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            message = f"{OPTION}: {keyword}: expected values that JSON has, got another ({error}); write JSON alone."
            raise OptionError(message, OPTION) from error


def _check_pattern(pattern: str) -> Iterator[tuple[bool, str, object]]:
    """Yield checks for a regular expression, as :func:`_check_keyword` does."""
    unescaped = re.sub(r"\\[^DWdw]", "x", pattern)  # any letter in place of an escaped character, such as \[
    expected = r"patterns without \D, \W, [^\d], [^\w], (?i) and sets in classes, where engines differ"
    yield not _AMBIGUOUS.search(unescaped), expected, pattern
    narrow = _WIDE.sub("x", pattern)  # wide parts may name control characters, since they leave other characters
    expected = r"patterns without control characters but \b, \f, \n, \r and \t"
    yield not _CONTROL_IN_PATTERN.search(narrow), expected, pattern


def _to_float(number: Any) -> float:  # noqa: ANN401 - an integer of any size, or a float
    """Return a number as a float; infinite if it is too large for a float."""
    return float(Decimal(number))
