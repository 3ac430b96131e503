"""Malformed files: valid files with damage, and values that parsers fail on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import Phase
from hypothesis import strategies as st

NUM_EXAMPLES = int(os.environ.get("REFUSION_LIT_HARD_EXAMPLES", "8"))
"""Examples per fuzz test; ``nox -s hard`` runs many more."""

PHASES = [Phase.explicit, Phase.generate]  # no shrinking: failing examples are small, and it takes minutes

MARKUP = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "-->&lt;<!--",
    "\"'><svg/onload=alert(1)>",
    "]]>",
    "{{ 7 * 7 }}${data}",
    "\x1b[2J\x1b]0;title\x07",
    "\u202eevil\u2066",
    "a\u2028b\x85c\x0bd",
    "\x00",
    "é𝄞",
)
"""Model output that a page or a terminal must display and never interpret."""

NUMBERS = ("1e999", "-1e999", "NaN", "-Infinity", "1e-999", "-0", "9" * 400, "7" * 5000, "0.1e1", "12345678901", "true")
HALF_PAIR = '"\\ud800"'


def nest_lists(depth: int) -> str:
    """Return nested lists as JSON."""
    return "[" * depth + "]" * depth


def raw_json() -> st.SearchStrategy[str]:
    """Draw JSON or almost JSON: numbers beyond every type, half surrogate pairs, repeated keys, deep nesting."""
    texts = st.one_of(st.text(max_size=8), st.sampled_from(MARKUP)).map(json.dumps)
    depths = st.sampled_from([3, 100, 300, 400, 480, 490, 900, 960, 970, 980, 985, 990, 995, 1000, 3000, 100_000])
    leaves = st.one_of(
        st.sampled_from([*NUMBERS, HALF_PAIR, "null", "", "{", "]", '"']), texts, st.integers().map(str),
        depths.map(nest_lists),
    )  # fmt: skip
    keys = st.one_of(texts, st.sampled_from([HALF_PAIR, '"query"', '"response"', '"prompt"', '"id"']))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda values: f"[{','.join(values)}]"),
            st.lists(st.tuples(keys, inner), max_size=3).map(
                lambda pairs: f"{{{','.join(f'{key}:{value}' for key, value in pairs)}}}"
            ),
        ),
        max_leaves=5,
    )


@st.composite
def damaged_files(draw: st.DrawFn, data: bytes, tokens: Sequence[bytes] = (), max_edits: int = 3) -> bytes:
    """Draw a file with parts deleted, duplicated, overwritten or inserted."""
    for _ in range(draw(st.integers(0, max_edits))):
        start = draw(st.integers(0, len(data)))
        stop = min(start + draw(st.sampled_from([0, 1, 1, 2, 8, 100_000])), len(data))
        new = st.one_of(st.binary(max_size=4), st.just(data[start:stop] * 2), st.sampled_from([b"", b"\n", *tokens]))
        data = data[:start] + draw(new) + data[stop:]
    return data


def list_paths(values: Any) -> list[tuple[Any, ...]]:
    """Return the path of every value inside lists and objects."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = enumerate(values)
    return [(), *((key, *path) for key, value in items for path in list_paths(value))]


class Raw(str):
    """JSON that :func:`dumps` writes verbatim."""


def dumps(values: Any) -> str:
    """Return JSON, with raw parts verbatim."""
    if isinstance(values, Raw):
        return str(values)
    if isinstance(values, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dumps(value)}" for key, value in values.items()) + "}"
    if isinstance(values, list):
        return "[" + ",".join(map(dumps, values)) + "]"
    return json.dumps(values)


@st.composite
def with_replaced_values(draw: st.DrawFn, values: Any, max_edits: int = 3) -> str:
    """Draw JSON with a valid structure in which a few values are replaced or removed."""
    values = json.loads(json.dumps(values))
    for _ in range(draw(st.integers(0, max_edits))):
        path = draw(st.sampled_from(list_paths(values)))
        if not path:
            continue
        holder = values
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.integers(0, 5)) == 0:
            del holder[path[-1]]
        else:
            holder[path[-1]] = Raw(draw(raw_json()))
    return dumps(values)


def outcome(work: Callable[[], Any]) -> Any:
    """Return the result of a call or the message of its ValueError; other exceptions propagate.

    Raises:
        AssertionError: If the message is empty, or a codec's, which does not name the file.
    """
    refused = None
    try:
        return work()
    except ValueError as error:
        refused = error
    if isinstance(refused, UnicodeError) or not str(refused).strip():
        raise AssertionError(f"no message for users: {refused!r}") from refused
    return str(refused)
