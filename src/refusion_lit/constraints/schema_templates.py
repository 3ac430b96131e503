"""JSON schemas as templates, for decoders that sample in any order and keep given text.

The text around the values is given. A value is a span of fixed length with alternatives: an alternative lists the
allowed tokens for every place, and pads the value with spaces. A sampled token removes the alternatives that do not
allow it, so that old and new tokens in a span always form a value. If a value is optional or has several schemas, the
span has a template per case, and spaces pad the templates to equal length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations, groupby, islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.constraints.schema_structure import (
    MAX_ITEMS,
    NOTE_KEYWORDS,
    OPTION,
    SCHEMA_FIX,
    TYPES,
    UNIONS,
    VALUES,
    are_disjoint,
    count_values,
    inline_references,
    refusal,
)
from refusion_lit.constraints.tool_calls import ToolFormat
from refusion_lit.data.encoding import encode_text, encode_within, split_added_tokens
from refusion_lit.types import Constraint, ConstraintState
from refusion_lit.utils.require import OptionError

MAX_NUMBER = 999_999
"""Maximum absolute value for numbers without bounds."""
MAX_STRING = 32
"""Maximum string length in tokens."""
MAX_VALUES = 10_000
"""Maximum number of values in a schema, with optional values, and all options of unions and enumerations."""
MAX_OPTIONS = 200
"""Maximum number of schemas in ``oneOf``."""
MAX_CHOICES = 100_000
"""Maximum number of tokens in all alternatives for a value, a union or an optional value."""
MAX_TOTAL = 1_000_000
"""Maximum number of tokens in all alternatives for all values."""
_DIGITS = "0123456789"

Span = Sequence[Sequence[Tensor]]
"""Alternatives with equal lengths. An alternative has the allowed ids at every place, int [id]."""


@dataclass(frozen=True)
class Choice:
    """A span that holds any of several templates.

    Attributes:
        templates: For every template, its spans by first place, counted from the start of this span.
        length: Span length in places.
    """

    templates: Sequence[Mapping[int, Span | Choice]]
    length: int


def _length(span: Span | Choice) -> int:
    return span.length if isinstance(span, Choice) else len(span[0])


class _Alternatives:
    """A span's remaining alternatives."""

    def __init__(self, span: Span) -> None:
        self._remaining = [*span]

    def choices(self, place: int) -> list[Tensor]:
        """Return the ids that the alternatives allow at a place, an entry per alternative."""
        return [alternative[place] for alternative in self._remaining]

    def narrow(self, place: int, token: int) -> None:
        """Remove the alternatives that do not allow a token."""
        self._remaining = [alternative for alternative in self._remaining if token in alternative[place]]


class _Templates:
    """A choice's remaining templates, and the remaining alternatives in their spans."""

    def __init__(self, templates: Iterable[Mapping[int, Span | Choice]]) -> None:
        self._remaining = [
            {
                start + i: (start, state)
                for start, span in template.items()
                for state in [_Templates(span.templates) if isinstance(span, Choice) else _Alternatives(span)]
                for i in range(_length(span))
            }
            for template in templates
        ]  # fmt: skip

    def choices(self, place: int) -> list[Tensor]:
        """Return the ids that the templates allow at a place, an entry per alternative."""
        spans = [template[place] for template in self._remaining if place in template]
        return [choice for start, span in spans for choice in span.choices(place - start)]

    def narrow(self, place: int, token: int) -> None:
        """Remove the templates and alternatives that do not allow a token."""
        spans = [(template, *template[place]) for template in self._remaining]
        fitting = [entry for entry in spans if any(token in choice for choice in entry[2].choices(place - entry[1]))]
        self._remaining = [template for template, _, _ in fitting]
        for _, start, span in fitting:
            span.narrow(place - start, token)


class TemplateState(ConstraintState):
    """The remaining templates, and the remaining alternatives in their spans.

    Args:
        vocab_size: Vocabulary size.
        templates: For every template that the response may follow, its spans by first place. All templates' spans cover
            the same places.
    """

    def __init__(self, vocab_size: int, *templates: Mapping[int, Span | Choice]) -> None:
        self._vocab_size = vocab_size
        self._templates = _Templates(templates)

    def allowed_tokens(self, place: int, before: Sequence[int]) -> Tensor | None:  # noqa: ARG002
        """Return the ids that a remaining alternative allows at a place."""
        choices = self._templates.choices(place)
        if not choices:
            return None
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        for ids in {id(choice): choice for choice in choices}.values():  # alternatives share tensors
            mask[ids] = True
        return mask

    def settle(self, place: int, before: Sequence[int], token: int) -> int:  # noqa: ARG002
        """Remove the templates and alternatives that do not allow a sampled token.

        Returns:
            The token, or a remaining alternative's token if no alternative allows it: another token from the same
            forward pass may have removed the alternatives that did.
        """
        choices = self._templates.choices(place)
        if not choices:
            return token
        if not any(token in choice for choice in choices):
            token = int(choices[0][0])
        self._templates.narrow(place, token)
        return token


Cases = tuple[Iterable[Any], ...]
"""Template parts for a span, a template per case."""


class TemplateCompiler:
    """Compiles JSON schemas to templates.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Vocabulary size.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        prefix = encode_text(tokenizer, "1")  # SentencePiece drops the space at the beginning of a text
        start = len(str(tokenizer.decode(prefix)))  # others put a space there
        texts = tokenizer.batch_decode([[*prefix, token] for token in range(vocab_size)])
        self._texts = ["" if token in special else text[start:] for token, text in enumerate(texts)]
        self._sets: dict[tuple[str, ...], Tensor] = {}
        self._ids: dict[str, list[int]] = {}
        for token, text in enumerate(self._texts):
            self._ids.setdefault(text, []).append(token)
        banned = ('"', "\\", "\N{REPLACEMENT CHARACTER}")
        sizes = [len(text) * (text.isprintable() and not any(map(text.count, banned))) for text in self._texts]
        self._sizes = torch.tensor(sizes)  # number of characters; 0 for tokens that cannot stand in a string

    def compile(self, schema: object) -> tuple[tuple[int | None, ...], Constraint]:
        """Return a response's given tokens, ``None`` in spans, and the constraint for the spans.

        Raises:
            ValueError: If no template can guarantee the schema, or the tokenizer lacks a token.
        """
        [whole] = _inline([schema])
        given, spans = self._lay_out(self._parts(whole, "the schema"))
        return self._constrain(given, [spans])

    def compile_call(
        self, functions: Mapping[str, object], tool_format: ToolFormat
    ) -> tuple[tuple[int | None, ...], Constraint]:
        """Return a response's given tokens, and a constraint that lets the response be a call.

        Every function has a template, padded to the same length. The first drafted name token decides the function.

        Args:
            functions: Argument schemas by function name.
            tool_format: How the model writes calls.

        Raises:
            ValueError: If no template can guarantee a schema, or the tokenizer lacks a token.
        """
        templates = []
        for name, whole in zip(functions, _inline(functions.values()), strict=True):
            head = f"{tool_format.before_name}{name}{tool_format.after_name}"
            begin = self._split_added(tool_format.begin + head)
            parameters = self._parts(whole, f"the parameters of {name}")
            templates.append(self._lay_out(chain(begin, parameters)))
        length = self._pad_templates(templates)
        places = list(zip(*(given for given, _ in templates), strict=True))
        common = [places[i][0] if len({*places[i]}) == 1 else None for i in range(length)]
        for given, spans in templates:
            _cover(given, spans, [token is None for token in common])
        end, _ = self._lay_out(self._split_added(tool_format.after_arguments + tool_format.end))
        return self._constrain([*common, *end], [spans for _, spans in templates])

    def _pad_templates(self, templates: Sequence[tuple[list[int | None], dict[int, Span | Choice]]]) -> int:
        """Pad templates with spaces to equal length; return the length."""
        length = max(len(given) for given, _ in templates)
        space = self._token_set(" ")
        for given, spans in templates:
            if len(space) > 1:
                spans |= {place: [[space]] for place in range(len(given), length)}
            given += [int(space[0]) if len(space) == 1 else None] * (length - len(given))
        return length

    def _constrain(
        self, given: Sequence[int | None], templates: Sequence[Mapping[int, Span | Choice]]
    ) -> tuple[tuple[int | None, ...], Constraint]:
        constraint = Constraint(begin=lambda _: TemplateState(len(self._texts), *templates), left_to_right=False)
        return (*given, int(self._tokenizer.eos_token_id)), constraint  # type: ignore[arg-type]

    def _split_added(self, text: str) -> list[str | int]:
        """Return a text as parts: added tokens that it names as ids, and the text around them."""
        return [
            int(self._tokenizer.convert_tokens_to_ids(part)) if is_name else part  # type: ignore[arg-type]
            for part, is_name in split_added_tokens(self._tokenizer, text)
        ]

    def _lay_out(self, parts: Iterable[Any]) -> tuple[list[int | None], dict[int, Span | Choice]]:
        """Lay out text, ids and spans: return the given tokens, ``None`` in spans, and the spans by place."""
        kept: list[Any] = []
        num_tokens = 0
        with _named_errors():
            for part in parts:
                kept.append(self._lay_out_cases(part) if isinstance(part, tuple) else part)
                num_tokens += 1 if isinstance(part, str | int) else _num_tokens(kept[-1])
                if num_tokens > MAX_TOTAL:
                    raise refusal(f"more than {MAX_TOTAL} tokens of possible values", "the schema")
        given: list[int | None] = []
        spans: dict[int, Span | Choice] = {}
        for kind, group in groupby(kept, type):
            if kind is str:
                given += self._encode("".join(group))
                continue
            for part in group:
                if kind is int:
                    given.append(part)
                else:
                    spans[len(given)] = part
                    given += [None] * _length(part)
        return given, spans

    def _lay_out_cases(self, cases: Cases) -> Choice:
        """Return a span with a template per case."""
        templates = [self._lay_out(parts) for parts in cases]
        length = self._pad_templates(templates)
        for given, spans in templates:
            _cover(given, spans, [True] * length)
        choice = Choice([spans for _, spans in templates], length)
        if _num_tokens(choice) > MAX_CHOICES:
            raise refusal(f"more than {MAX_CHOICES} tokens of possible values", "a union or an optional value")
        return choice

    def _parts(self, schema: Any, name: str) -> Iterator[Any]:  # noqa: ANN401 - text, spans and cases
        """Yield the text, spans and cases for a value; ``name`` is for errors."""
        schema = schema if isinstance(schema, Mapping) else {}
        union = next((keyword for keyword in UNIONS if keyword in schema), None)
        if union is not None:
            yield from self._union(schema, union, name)
            return
        kinds = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
        for kind in kinds:
            if kind not in (None, *TYPES):
                raise refusal(f"the type {kind!r}", name)
        types = {kind for name in kinds for kind in TYPES.get(name, (set(), set()))[0]}
        keywords = {keyword for name in kinds for keyword in TYPES.get(name, (set(), set()))[1]}
        listed = next(({keyword} for keyword in VALUES if keyword in schema), set())
        for keyword in sorted(schema.keys() - NOTE_KEYWORDS - (listed or keywords)):
            raise refusal(keyword, name)
        if listed:
            options = [schema["const"]] if "const" in schema else list(schema["enum"])
            yield self._choice([option for option in options if kinds == [None] or type(option) in types], name)
        elif len(kinds) != 1:
            others = {kind: keywords - TYPES[kind][1] | {"type"} for kind in kinds}
            cases = [
                {"type": kind} | {word: value for word, value in schema.items() if word not in others[kind]}
                for kind in kinds
            ]
            yield from self._cases(cases, name)
        else:
            yield from self._typed_value(schema, kinds[0], name)

    def _typed_value(self, schema: Mapping[str, Any], kind: str | None, name: str) -> Iterator[Any]:
        """Yield the text, spans and cases for a value with a type."""
        if kind == "object":
            yield from self._object(schema, name)
        elif kind == "array":
            yield from self._array(schema, name)
        elif kind == "string":
            yield '"'
            yield self._string(schema.get("minLength", 0), schema.get("maxLength"), name)
        elif kind in ("integer", "number"):
            yield self._number(schema, name)
        elif kind is not None:
            yield self._choice([True, False] if kind == "boolean" else [None], name)
        else:
            raise refusal("values of any type", name)

    def _union(self, schema: Mapping[str, Any], union: str, name: str) -> Iterator[Any]:
        """Yield the cases for ``anyOf`` or ``oneOf``."""
        for keyword in sorted(schema.keys() - NOTE_KEYWORDS - {union}) + ["type"] * ("type" in schema):
            raise refusal(f"{keyword} beside {union}", name)
        options = schema[union]
        if not isinstance(options, list):
            raise refusal(f"{union} without a list", name)
        if union == "oneOf" and len(options) > MAX_OPTIONS:  # every pair is compared
            raise refusal(f"oneOf with more than {MAX_OPTIONS} options", name)
        if union == "oneOf" and not all(are_disjoint(*pair) for pair in combinations(options, 2)):
            raise refusal("oneOf with options that may have a value in common", name)
        yield from self._cases(options, name)

    def _cases(self, options: Sequence[Any], name: str) -> Iterator[Any]:
        """Yield the parts of the only schema, or a case per schema."""
        if not options:
            raise refusal("no value", name)
        if len(options) == 1:
            yield from self._parts(options[0], name)
        else:
            yield tuple(self._parts(option, name) for option in options)

    def _object(self, schema: Mapping[str, Any], name: str) -> Iterator[Any]:
        """Yield an object's parts. A span with spaces alone leaves out its optional property."""
        properties = schema.get("properties")
        required = {*schema.get("required", ())}
        if properties is None:
            raise refusal("optional or unnamed properties", name)
        if not required <= properties.keys():
            raise refusal("required properties without a schema", name)
        required = required or {*islice(properties, 1)}  # commas stand beside a property that is there
        has_required = False
        yield "{"
        for key, value in properties.items():
            label, parts = f"{json.dumps(key)}: ", self._parts(value, json.dumps(key))
            before, after = (f", {label}", "") if has_required else (label, ", ")
            if key in required:
                yield before
                yield from parts
                has_required = True
            else:
                yield (chain([before], parts, [after]), ())
        yield "}"

    def _array(self, schema: Mapping[str, Any], name: str) -> Iterator[Any]:
        """Yield an array's parts. Items beyond the first and ``minItems`` may be left out."""
        fewest = schema.get("minItems", 0)
        most = math.floor(schema.get("maxItems", max(fewest, MAX_ITEMS)))
        if fewest > most:
            raise refusal(f"minItems {fewest}", name)
        yield "["
        for i in range(most):
            parts = self._parts(schema.get("items"), f"the items of {name}")
            separator = ", " if i else ""
            if i < max(fewest, 1):
                yield separator
                yield from parts
            else:
                yield (chain([separator], parts), ())
        yield "]"

    def _choice(self, options: Sequence[object], name: str) -> str | Span:
        """Return the only option's text, or a span for several options."""
        if not options:
            raise refusal("no value", name)
        texts = [json.dumps(option) for option in options]
        if len(texts) == 1:
            return texts[0]
        return self._pad(([torch.tensor([token]) for token in self._encode(text)] for text in texts), name)

    def _string(self, fewest: float, most: float | None, name: str) -> Span:
        """Return a span for a string and its closing quote, with an alternative per length in tokens."""
        # Tokens have at most a quarter of the allowed characters, so a limit of characters becomes a limit of tokens.
        largest = int(self._sizes.max())
        largest = largest if most is None else max(1, min(largest, math.floor(most) // 4))
        num = MAX_STRING if most is None else min(math.floor(most) // largest, MAX_STRING)
        if fewest > num:
            raise refusal(f"minLength {fewest}", name)
        body = ((self._sizes > 0) & (self._sizes <= largest)).nonzero()[:, 0]
        quote = self._token_set('"')
        return self._pad(([*[body] * i, quote] for i in range(math.ceil(fewest), num + 1)), name)

    def _number(self, schema: Mapping[str, Any], name: str) -> Span:
        """Return a span for an integer, and for a number with up to two decimals if the type is ``number``."""
        exclusive = {
            keyword: schema[keyword] for keyword in ("exclusiveMinimum", "exclusiveMaximum") if keyword in schema
        }
        for keyword, bound in exclusive.items():
            if isinstance(bound, bool):  # draft 4
                raise refusal(f"{keyword} without a number", name)
        lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
        highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
        lows += [math.floor(exclusive["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in exclusive else []
        highs += [math.ceil(exclusive["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in exclusive else []
        high = min(highs, default=max(MAX_NUMBER, *lows, 0))
        low = max(lows, default=min(-MAX_NUMBER, high))
        if low > high:
            raise refusal("no integer within its bounds", name)
        patterns = _numbers(low, high)
        if schema["type"] == "number":
            patterns = chain(patterns, _decimals(low, high))
        return self._pad(([self._token_set(*characters) for characters in pattern] for pattern in patterns), name)

    def _pad(self, alternatives: Iterable[Sequence[Tensor]], name: str) -> Span:
        """Pad alternatives with spaces to a span; an error ends the generator when there are too many."""
        span: list[Sequence[Tensor]] = []
        length = 0
        for alternative in alternatives:
            span.append(alternative)
            length = max(length, len(alternative))
            if length * len(span) > MAX_CHOICES:
                raise refusal(f"more than {MAX_CHOICES} tokens of possible values", name)
        space = self._token_set(" ")
        return [[*alternative, *[space] * (length - len(alternative))] for alternative in span]

    def _token_set(self, *texts: str) -> Tensor:
        """Return the tokens whose text is among ``texts``."""
        if texts not in self._sets:
            ids = [token for text in texts for token in self._ids.get(text, ())]
            if not ids:
                names = ", ".join(map(repr, texts))
                message = f"{OPTION}: this tokenizer has no token for any of {names}; {SCHEMA_FIX}."
                raise OptionError(message, OPTION)
            self._sets[texts] = torch.tensor(ids)
        return self._sets[texts]

    def _encode(self, text: str) -> list[int]:
        ids = encode_within(self._tokenizer, text)
        if "".join(self._texts[token] for token in ids) != text:
            message = f"{OPTION}: this tokenizer cannot write {text[:40]!r}; {SCHEMA_FIX}."
            raise OptionError(message, OPTION)
        return ids


@contextmanager
def _named_errors() -> Iterator[None]:
    """Raise an error for users if a keyword's value has the wrong type."""
    try:
        yield
    except (AttributeError, TypeError, RecursionError) as error:
        raise OptionError(f"{OPTION}: this schema is wrong: {error}.", OPTION) from error


def _inline(schemas: Iterable[object]) -> list[Any]:
    """Return schemas without references; refuse too many values before any of them is encoded."""
    with _named_errors():
        whole = [inline_references(schema, schema, {}, ()) for schema in schemas]
        if sum(count_values(schema, {}) for schema in whole) > MAX_VALUES:
            raise refusal(f"more than {MAX_VALUES} values", "the schema")
    return whole


def _cover(given: Sequence[int | None], spans: dict[int, Span | Choice], is_open: Sequence[bool]) -> None:
    """Turn a template's given tokens at open places into spans with a single alternative."""
    for place, token in enumerate(given):
        if token is not None and is_open[place]:
            spans[place] = [[torch.tensor([token])]]


def _num_tokens(span: Span | Choice) -> int:
    """Count the places in all alternatives."""
    if isinstance(span, Choice):
        return sum(_num_tokens(inner) for template in span.templates for inner in template.values())
    return len(span) * len(span[0])


def _numbers(low: int, high: int) -> Iterator[list[str]]:
    """Yield the integers from ``low`` to ``high`` as patterns, which list the characters allowed at every place.

    >>> list(_numbers(-1, 12))
    [['0123456789'], ['1', '012'], ['-', '1']]
    """
    yield from _blocks(max(low, 0), high)
    yield from (["-", *block] for block in _blocks(max(1, -high), -low))


def _decimals(low: int, high: int) -> Iterator[list[str]]:
    """Yield the numbers with one or two decimals between two integers, as patterns."""
    negative = (["-", *block] for block in _blocks(max(-high, 0), -low - 1))
    whole = chain(_blocks(max(low, 0), high - 1), negative)
    return ([*block, ".", *[_DIGITS] * num] for block in whole for num in (1, 2))


def _blocks(low: int, high: int) -> Iterator[list[str]]:
    """Yield patterns for integers: fixed digits, a digit range, then any digits."""
    while low <= high:
        digits = str(low)
        free = 0
        while free + 1 < len(digits) and low % 10 ** (free + 1) == 0 and low + 10 ** (free + 1) - 1 <= high:
            free += 1
        first = int(digits[-free - 1])
        last = min(9, first + (high - low + 1) // 10**free - 1)
        yield [*digits[: -free - 1], _DIGITS[first : last + 1], *[_DIGITS] * free]
        low += (last - first + 1) * 10**free
