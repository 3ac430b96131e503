"""JSON schemas as templates, for decoders that draw in any order and keep given text.

The text around the values is given, and each value is a span of fixed length: alternatives, each of which says for
every place which tokens may stand there, with spaces after the value. Every draw in a span drops the alternatives that
it does not fit, so that any mixture of a span's draws, old and new, is a value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_text
from refusion_lit.types import Constraint, ConstraintState

MAX_NUMBER = 999_999
"""Maximum absolute value of a number without bounds."""
MAX_STRING = 32
"""Maximum number of tokens of a string."""
MAX_CHOICES = 100_000
"""Maximum number of tokens of all alternatives of a value."""
MAX_TOTAL = 1_000_000
"""Maximum number of tokens of all alternatives of all values of a schema."""
_NOTES = {"type", "$schema", "$comment", "title", "description", "default", "examples"}
_KINDS: dict[object, tuple[set[type], set[str]]] = {
    "object": ({dict}, {"properties", "required", "additionalProperties"}),
    "string": ({str}, {"minLength", "maxLength"}),
    "integer": ({int}, {"minimum", "maximum"}),
    "number": ({int, float}, {"minimum", "maximum"}),
    "boolean": ({bool}, set()),
    "null": ({NoneType}, set()),
}
"""Types of a kind's values in an enumeration, and its keywords."""
_FIX = "change the schema, or use Autoregressive or SelfSpeculative"
_DIGITS = "0123456789"

Span = Sequence[Sequence[Tensor]]
"""Alternatives of one length; each place has the ids that may stand there, int [id]."""


class Filling(ConstraintState):
    """The alternatives that are left of each span: at first all of them.

    Args:
        size: Number of ids of the vocabulary.
        spans: The spans, by the place of their first token.
    """

    def __init__(self, size: int, spans: Mapping[int, Span]) -> None:
        self._size = size
        self._left = {start: list(span) for start, span in spans.items()}
        self._starts = {start + i: start for start, span in spans.items() for i in range(len(span[0]))}

    def allowed(self, place: int, before: Sequence[int]) -> Tensor | None:  # noqa: ARG002
        """Return the ids that any of the alternatives that are left has at a place."""
        start = self._starts.get(place)
        if start is None:
            return None
        mask = torch.zeros(self._size, dtype=torch.bool)
        for ids in {id(each[place - start]): each[place - start] for each in self._left[start]}.values():
            mask[ids] = True
        return mask

    def settle(self, place: int, before: Sequence[int], token: int) -> int:  # noqa: ARG002
        """Drop the alternatives that a drawn token does not fit; return it, or the token of one that is left."""
        start = self._starts.get(place)
        if start is None:
            return token
        left = self._left[start]
        # Another draw of the same forward may have dropped the token's alternative.
        if not any(token in each[place - start] for each in left):
            token = int(left[0][place - start][0])
        self._left[start] = [each for each in left if token in each[place - start]]
        return token


class Templates:
    """Turns schemas into templates.

    Args:
        tokenizer: The model's tokenizer.
        size: Number of ids that it knows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self._tokenizer = tokenizer
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        before = encode_text(tokenizer, "1")  # tokenizers that mark words drop the space at the beginning of a text
        found = tokenizer.batch_decode([[*before, token] for token in range(size)])
        self._texts = ["" if token in special else text[1:] for token, text in enumerate(found)]
        self._sets: dict[tuple[str, ...], Tensor] = {}
        self._ids: dict[str, list[int]] = {}
        for token, text in enumerate(self._texts):
            self._ids.setdefault(text, []).append(token)
        banned = ('"', "\\", "\N{REPLACEMENT CHARACTER}")
        sizes = [len(text) * (text.isprintable() and not any(map(text.count, banned))) for text in self._texts]
        self._sizes = torch.tensor(sizes)  # characters of those that may stand in a string

    def of(self, schema: object) -> tuple[tuple[int | None, ...], Constraint]:
        """Return the given tokens of every response, and what keeps its spans.

        Raises:
            ValueError: If the schema has what no template can guarantee, or the tokenizer lacks a token.
        """
        given: list[int | None] = []
        spans: dict[int, Span] = {}
        parts: list[Any] = []
        num_tokens = 0
        try:
            for part in self._parts(schema, "the schema"):
                parts.append(part)
                num_tokens += 0 if isinstance(part, str) else len(part) * len(part[0])
                if num_tokens > MAX_TOTAL:
                    raise _refusal(f"more than {MAX_TOTAL} tokens of possible values", "the schema")
        except (AttributeError, TypeError, RecursionError) as error:  # a value of a keyword has another type
            raise ValueError(f"json_schema: this schema is wrong: {error}.") from error
        for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
            if is_text:
                given += self._encoded("".join(map(str, group)))
                continue
            for span in group:
                spans[len(given)] = span
                given += [None] * len(span[0])
        constraint = Constraint(begin=lambda _: Filling(len(self._texts), spans), left_to_right=False)
        return (*given, int(self._tokenizer.eos_token_id)), constraint  # type: ignore[arg-type]

    def _parts(self, schema: Any, name: str) -> Iterator[Any]:  # noqa: ANN401 - text, and spans
        """Yield the text and the spans of a value; ``name`` is for errors."""
        schema = schema if isinstance(schema, Mapping) else {}
        kind = schema.get("type")
        if kind not in (None, *_KINDS):
            raise _refusal(f"the type {kind!r}", name)
        types, keywords = _KINDS.get(kind, (set(), set()))
        listed = next(({each} for each in ("const", "enum") if each in schema), set())
        for keyword in sorted(schema.keys() - _NOTES - (listed or keywords)):
            raise _refusal(keyword, name)
        if listed:
            options = [schema["const"]] if "const" in schema else list(schema["enum"])
            yield self._choice([each for each in options if kind is None or type(each) in types], name)
        elif kind == "object":
            properties = schema.get("properties") or {}
            if not properties or properties.keys() != set(schema.get("required", ())):
                raise _refusal("optional or unnamed properties", name)
            for i, (key, value) in enumerate(properties.items()):
                yield f"{', ' if i else '{'}{json.dumps(key)}: "
                yield from self._parts(value, json.dumps(key))
            yield "}"
        elif kind == "string":
            yield '"'
            yield self._string(schema.get("minLength", 0), schema.get("maxLength"), name)
        elif kind in ("integer", "number"):
            yield self._number(schema, name)
        elif kind is not None:
            yield self._choice([True, False] if kind == "boolean" else [None], name)
        else:
            raise _refusal("values of any type", name)

    def _choice(self, options: Sequence[object], name: str) -> str | Span:
        """Return a value, or a span of one of several."""
        if not options:
            raise _refusal("no value", name)
        texts = [json.dumps(option) for option in options]
        if len(texts) == 1:
            return texts[0]
        return self._padded(([torch.tensor([token]) for token in self._encoded(text)] for text in texts), name)

    def _string(self, fewest: float, most: float | None, name: str) -> Span:
        """Return a span of a string and its closing quote: alternatives by the number of tokens."""
        # Tokens of at most a quarter of the characters, so that a limit of characters is one of tokens.
        largest = int(self._sizes.max())
        largest = largest if most is None else max(1, min(largest, math.floor(most) // 4))
        num = MAX_STRING if most is None else min(math.floor(most) // largest, MAX_STRING)
        if fewest > num:
            raise _refusal(f"minLength {fewest}", name)
        body = ((self._sizes > 0) & (self._sizes <= largest)).nonzero()[:, 0]
        quote = self._set('"')
        return self._padded(([*[body] * i, quote] for i in range(math.ceil(fewest), num + 1)), name)

    def _number(self, schema: Mapping[str, Any], name: str) -> Span:
        """Return a span of a number; with ``number``, of one with up to two decimals."""
        high = math.floor(schema.get("maximum", max(MAX_NUMBER, schema.get("minimum", 0))))
        low = math.ceil(schema.get("minimum", min(-MAX_NUMBER, high)))
        if low > high:
            raise _refusal("no integer within its bounds", name)
        found = _numbers(low, high)
        if schema["type"] == "number":
            found = chain(found, _decimals(low, high))
        return self._padded(([self._set(*characters) for characters in each] for each in found), name)

    def _padded(self, alternatives: Iterable[Sequence[Tensor]], name: str) -> Span:
        """Return a span of alternatives, which are made one by one: the first too many ends it."""
        found: list[Sequence[Tensor]] = []
        length = 0
        for each in alternatives:
            found.append(each)
            length = max(length, len(each))
            if length * len(found) > MAX_CHOICES:
                raise _refusal(f"more than {MAX_CHOICES} tokens of possible values", name)
        space = self._set(" ")
        return [[*each, *[space] * (length - len(each))] for each in found]

    def _set(self, *texts: str) -> Tensor:
        """Return the tokens that have one of some texts."""
        if texts not in self._sets:
            found = [token for text in texts for token in self._ids.get(text, ())]
            if not found:
                named = ", ".join(map(repr, texts))
                raise ValueError(f"json_schema: this tokenizer has no token for any of {named}; {_FIX}.")
            self._sets[texts] = torch.tensor(found)
        return self._sets[texts]

    def _encoded(self, text: str) -> list[int]:
        ids = encode_text(self._tokenizer, text)
        if "".join(self._texts[token] for token in ids) != text:
            raise ValueError(f"json_schema: this tokenizer cannot write {text[:40]!r}; {_FIX}.")
        return ids


def _numbers(low: int, high: int) -> Iterator[list[str]]:
    """Yield the integers from ``low`` to ``high`` as alternatives: for each place, the characters that it may be."""
    yield from _blocks(max(low, 0), high)
    yield from (["-", *each] for each in _blocks(max(1, -high), -low))


def _decimals(low: int, high: int) -> Iterator[list[str]]:
    """Yield the numbers with one or two decimals between two integers, as alternatives."""
    negative = (["-", *each] for each in _blocks(max(-high, 0), -low - 1))
    whole = chain(_blocks(max(low, 0), high - 1), negative)
    return ([*each, ".", *[_DIGITS] * num] for each in whole for num in (1, 2))


def _blocks(low: int, high: int) -> Iterator[list[str]]:
    """Yield blocks of integers that share all digits before one, and whose digits after it are any."""
    while low <= high:
        digits = str(low)
        free = 0
        while free + 1 < len(digits) and low % 10 ** (free + 1) == 0 and low + 10 ** (free + 1) - 1 <= high:
            free += 1
        first = int(digits[-free - 1])
        last = min(9, first + (high - low + 1) // 10**free - 1)
        yield [*digits[: -free - 1], _DIGITS[first : last + 1], *[_DIGITS] * free]
        low += (last - first + 1) * 10**free


def _refusal(what: str, name: str) -> ValueError:
    return ValueError(f"json_schema: a decoder that draws in any order cannot keep {what} in {name}; {_FIX}.")
