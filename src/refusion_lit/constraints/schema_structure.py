"""JSON schema structure: references, how many values a schema has, and whether two schemas share a value.

:mod:`~refusion_lit.constraints.schema_templates` compiles schemas after these checks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import NoneType
from typing import Any
from urllib.parse import unquote

from refusion_lit.utils.require import OptionError

OPTION = "json_schema"
"""The option that errors name."""
MAX_ITEMS = 4
"""Maximum array length without ``maxItems``."""
NOTE_KEYWORDS = {"type", "$schema", "$comment", "title", "description", "default", "examples"}
"""Keywords beside which any other keyword may stand."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
TYPES: dict[object, tuple[set[type], set[str]]] = {
    "object": ({dict}, {"properties", "required", "additionalProperties"}),
    "array": ({list}, {"items", "minItems", "maxItems"}),
    "string": ({str}, {"minLength", "maxLength"}),
    "integer": ({int}, _BOUNDS),
    "number": ({int, float}, _BOUNDS),
    "boolean": ({bool}, set()),
    "null": ({NoneType}, set()),
}
"""By schema type: the Python types that its values have in an enumeration, and its keywords."""
VALUES = ("const", "enum")
"""Keywords that list the values."""
UNIONS = ("anyOf", "oneOf")
"""Keywords that list alternative schemas for a value."""
SCHEMA_FIX = "change the schema, or use Autoregressive or SelfSpeculative"


def inline_references(schema: Any, root: Any, known: dict[str, Any], path: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema with its local references replaced by the schemas that they name.

    Args:
        schema: The schema.
        root: The schema in which references are looked up.
        known: Schemas by the references that name them, filled by this function.
        path: References that led to the schema.

    Raises:
        ValueError: If a reference leads to itself or to nothing.
    """
    if not isinstance(schema, Mapping):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword not in ("$defs", "definitions")}
    only = rest["allOf"] if isinstance(rest.get("allOf"), list) and len(rest["allOf"]) == 1 else None
    if "$ref" in rest or only is not None:
        keyword = "$ref" if "$ref" in rest else "allOf"
        for other in sorted(rest.keys() - (NOTE_KEYWORDS - {"type"}) - {keyword}):
            raise refusal(f"{other} beside {keyword}", "the schema")
        if keyword == "allOf" and only is not None:
            return inline_references(only[0], root, known, path)
        reference = str(rest["$ref"])
        if reference in path:
            raise refusal(f"the reference {reference!r} to itself", "the schema")
        if reference not in known:
            known[reference] = inline_references(_resolve_reference(reference, root), root, known, (*path, reference))
        return known[reference]
    for keyword in {*UNIONS, "items"} & rest.keys():
        values = rest[keyword]
        is_list = isinstance(values, list)
        options = [inline_references(option, root, known, path) for option in (values if is_list else [values])]
        rest[keyword] = options if is_list else options[0]
    if isinstance(rest.get("properties"), Mapping):
        rest["properties"] = {
            name: inline_references(value, root, known, path) for name, value in rest["properties"].items()
        }
    return rest


def count_values(schema: Any, known: dict[int, int]) -> int:  # noqa: ANN401 - any JSON value
    """Count the values that a schema without references describes, all values in its enumerations included.

    Args:
        schema: The schema; several parts may be the same object.
        known: Counts by schema identity, filled by this function.
    """
    if not isinstance(schema, Mapping):
        return 1
    if id(schema) not in known:
        properties, items = schema.get("properties"), schema.get("items")
        options = [option for union in UNIONS if isinstance(schema.get(union), list) for option in schema[union]]
        options += properties.values() if isinstance(properties, Mapping) else []
        num_items = math.floor(schema.get("maxItems", max(schema.get("minItems", 0), MAX_ITEMS))) if items else 0
        listed = schema.get("enum")
        num_listed = len(listed) if isinstance(listed, list) else 0
        known[id(schema)] = 1 + num_listed + sum(count_values(option, known) for option in options)
        known[id(schema)] += num_items * count_values(items, known)
    return known[id(schema)]


def _resolve_reference(reference: str, root: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the schema that a reference names."""
    start, *steps = reference.split("/")
    target = root
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    if start != "#" or target is None:
        raise refusal(f"the reference {reference!r}, which names nothing in the schema,", "the schema")
    return target


def are_disjoint(first: Any, second: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Return whether two schemas certainly share no value: by type, listed values, or a required property."""
    if _have_no_common_value(first, second):
        return True
    if not all(isinstance(schema, Mapping) and schema.get("type") == "object" for schema in (first, second)):
        return False
    properties = [schema.get("properties") or {} for schema in (first, second)]
    required = (
        {*first.get("required", ())} & {*second.get("required", ())} & properties[0].keys() & properties[1].keys()
    )
    return any(_have_no_common_value(properties[0][name], properties[1][name]) for name in required)


def _have_no_common_value(first: Any, second: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Return whether two schemas differ in all types or in all listed values."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return False
    listed = [_list_values(schema) for schema in (first, second)]
    if listed[0] is not None and listed[1] is not None:
        return not {*map(_normalize, listed[0])} & {*map(_normalize, listed[1])}
    kinds = [_kinds(schema, values) for schema, values in zip((first, second), listed, strict=True)]
    return bool(kinds[0]) and bool(kinds[1]) and not kinds[0] & kinds[1]


def _list_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, if it lists any."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Mapping[str, Any], listed: list[Any] | None) -> set[str]:
    """Return the types that a schema names, with ``number`` for integers; empty if it names none."""
    kind = schema.get("type", [])
    names = {*(kind if isinstance(kind, list) else [kind])}
    for value in listed or ():
        names |= {name for name, (types, _) in TYPES.items() if type(value) in types}
    return {"number" if name == "integer" else name for name in names}


def _normalize(value: object) -> str:
    """Return a text that is equal for equal JSON values: for 1 and 1.0, but not for 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def refusal(what: str, name: str) -> OptionError:
    """Return the error for a schema part that no template guarantees.

    Args:
        what: The schema part.
        name: The value to which it belongs.
    """
    message = f"{OPTION}: a decoder that draws in any order cannot enforce {what} in {name}; {SCHEMA_FIX}."
    return OptionError(message, OPTION)
