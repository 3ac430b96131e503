"""JSON schemas as templates, for decoders that sample in any order and keep given text.

The text around the values is given. A value is a span of fixed length with alternatives: an alternative lists the
tokens allowed at every place of the span, and pads the value with spaces. A token sampled in a span removes the
alternatives that do not contain it there, so any mixture of old and new tokens in a span is a value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_text, encode_within, split_added_tokens
from refusion_lit.data.tool_calls import ToolFormat
from refusion_lit.types import Constraint, ConstraintState
from refusion_lit.utils.require import OptionError

MAX_NUMBER = 999_999
"""Maximum absolute value of numbers without bounds."""
MAX_STRING = 32
"""Maximum number of tokens in a string."""
MAX_ITEMS = 4
"""Maximum number of items in an array without ``maxItems``."""
MAX_CHOICES = 100_000
"""Maximum number of tokens in a value's alternatives."""
MAX_TOTAL = 1_000_000
"""Maximum number of tokens in the alternatives of all values of a schema."""
_NOTES = {"type", "$schema", "$comment", "title", "description", "default", "examples"}
_KINDS: dict[object, tuple[set[type], set[str]]] = {
    "object": ({dict}, {"properties", "required", "additionalProperties"}),
    "array": ({list}, {"items", "minItems", "maxItems"}),
    "string": ({str}, {"minLength", "maxLength"}),
    "integer": ({int}, {"minimum", "maximum"}),
    "number": ({int, float}, {"minimum", "maximum"}),
    "boolean": ({bool}, set()),
    "null": ({NoneType}, set()),
}
"""By type of a schema: Python types of its values in an enumeration, and its keywords."""
_FIX = "change the schema, or use Autoregressive or SelfSpeculative"
_DIGITS = "0123456789"

Span = Sequence[Sequence[Tensor]]
"""Alternatives of equal length. An alternative has the allowed ids at every place, int [id]."""


class _SpanAlternatives:
    """The remaining alternatives of a template's spans."""

    def __init__(self, spans: Mapping[int, Span]) -> None:
        self._remaining = {start: list(span) for start, span in spans.items()}
        self._starts = {start + i: start for start, span in spans.items() for i in range(len(span[0]))}

    def choices(self, place: int) -> list[Tensor]:
        """Return the ids that the alternatives allow at a place, an entry per alternative."""
        start = self._starts.get(place)
        return [] if start is None else [alternative[place - start] for alternative in self._remaining[start]]

    def allows(self, place: int, token: int) -> bool:
        """Return whether an alternative allows a token."""
        return any(token in choice for choice in self.choices(place))

    def narrow(self, place: int, token: int) -> None:
        """Remove the alternatives that do not allow a token."""
        start = self._starts[place]
        remaining = self._remaining[start]
        self._remaining[start] = [alternative for alternative in remaining if token in alternative[place - start]]


class TemplateState(ConstraintState):
    """The remaining templates, and the remaining alternatives of their spans.

    Args:
        vocab_size: Number of ids in the vocabulary.
        templates: For every template that the response may follow, its spans by the place of their first token. The
            spans of all templates cover the same places.
    """

    def __init__(self, vocab_size: int, *templates: Mapping[int, Span]) -> None:
        self._vocab_size = vocab_size
        self._templates = [_SpanAlternatives(spans) for spans in templates]

    def allowed(self, place: int, before: Sequence[int]) -> Tensor | None:  # noqa: ARG002
        """Return the ids that a remaining alternative allows at a place."""
        choices = [choice for template in self._templates for choice in template.choices(place)]
        if not choices:
            return None
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        for ids in {id(choice): choice for choice in choices}.values():  # alternatives share tensors
            mask[ids] = True
        return mask

    def settle(self, place: int, before: Sequence[int], token: int) -> int:  # noqa: ARG002
        """Remove the templates and alternatives that do not allow a sampled token.

        Returns:
            The token, or a token of a remaining alternative if no alternative allows it: another token of the same
            forward pass may have removed the alternatives that did.
        """
        choices = self._templates[0].choices(place)
        if not choices:
            return token
        if not any(template.allows(place, token) for template in self._templates):
            token = int(choices[0][0])
        self._templates = [template for template in self._templates if template.allows(place, token)]
        for template in self._templates:
            template.narrow(place, token)
        return token


class TemplateCompiler:
    """Compiles JSON schemas to templates.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Number of ids in the vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        prefix = encode_text(tokenizer, "1")  # SentencePiece drops the space at the beginning of a text
        texts = tokenizer.batch_decode([[*prefix, token] for token in range(vocab_size)])
        self._texts = ["" if token in special else text[1:] for token, text in enumerate(texts)]
        self._sets: dict[tuple[str, ...], Tensor] = {}
        self._ids: dict[str, list[int]] = {}
        for token, text in enumerate(self._texts):
            self._ids.setdefault(text, []).append(token)
        banned = ('"', "\\", "\N{REPLACEMENT CHARACTER}")
        sizes = [len(text) * (text.isprintable() and not any(map(text.count, banned))) for text in self._texts]
        self._sizes = torch.tensor(sizes)  # number of characters; 0 for tokens that cannot stand in a string

    def compile(self, schema: object) -> tuple[tuple[int | None, ...], Constraint]:
        """Return a response's given tokens, ``None`` in spans, and the constraint of the spans.

        Raises:
            ValueError: If no template can guarantee the schema, or the tokenizer lacks a token.
        """
        given, spans = self._lay_out(self._parts(schema, "the schema"))
        return self._constrain(given, [spans])

    def compile_call(
        self, functions: Mapping[str, object], tool_format: ToolFormat
    ) -> tuple[tuple[int | None, ...], Constraint]:
        """Return a response's given tokens, and a constraint that lets the response be a call.

        Every function has a template, padded to the same length. The first draft of a name decides the function.

        Args:
            functions: Schemas of the arguments by the function's name.
            tool_format: How the model writes calls.

        Raises:
            ValueError: If no template can guarantee a schema, or the tokenizer lacks a token.
        """
        templates = []
        for name, schema in functions.items():
            head = f"{tool_format.before_name}{name}{tool_format.after_name}"
            begin = self._split_added(tool_format.begin + head)
            templates.append(self._lay_out(chain(begin, self._parts(schema, f"the parameters of {name}"))))
        length = max(len(given) for given, _ in templates)
        for given, _ in templates:
            if len(given) < length:
                given += [int(self._token_set(" ")[0])] * (length - len(given))
        places = zip(*(given for given, _ in templates), strict=True)
        common = [tokens[0] if len({*tokens}) == 1 else None for tokens in places]
        for given, spans in templates:
            fixed = {place: token for place, token in enumerate(given) if token is not None and common[place] is None}
            spans |= {place: [[torch.tensor([token])]] for place, token in fixed.items()}
        end, _ = self._lay_out(self._split_added(tool_format.after_arguments + tool_format.end))
        return self._constrain([*common, *end], [spans for _, spans in templates])

    def _constrain(
        self, given: Sequence[int | None], templates: Sequence[Mapping[int, Span]]
    ) -> tuple[tuple[int | None, ...], Constraint]:
        constraint = Constraint(begin=lambda _: TemplateState(len(self._texts), *templates), left_to_right=False)
        return (*given, int(self._tokenizer.eos_token_id)), constraint  # type: ignore[arg-type]

    def _split_added(self, text: str) -> list[str | int]:
        """Return a text as parts: added tokens that it names as ids, and the text around them."""
        return [
            int(self._tokenizer.convert_tokens_to_ids(part)) if is_name else part  # type: ignore[arg-type]
            for part, is_name in split_added_tokens(self._tokenizer, text)
        ]

    def _lay_out(self, parts: Iterable[Any]) -> tuple[list[int | None], dict[int, Span]]:
        """Return the tokens of text, ids and spans, ``None`` in spans, and the spans by place."""
        kept: list[Any] = []
        num_tokens = 0
        try:
            for part in parts:
                kept.append(part)
                num_tokens += len(part) * len(part[0]) if isinstance(part, list) else 1
                if num_tokens > MAX_TOTAL:
                    raise _refusal(f"more than {MAX_TOTAL} tokens of possible values", "the schema")
        except (AttributeError, TypeError, RecursionError) as error:  # a value of a keyword has another type
            raise OptionError(f"json_schema: this schema is wrong: {error}.", "json_schema") from error
        given: list[int | None] = []
        spans: dict[int, Span] = {}
        for kind, group in groupby(kept, type):
            if kind is str:
                given += self._encode("".join(group))
                continue
            for part in group:
                if kind is int:
                    given.append(part)
                else:
                    spans[len(given)] = part
                    given += [None] * len(part[0])
        return given, spans

    def _parts(self, schema: Any, name: str) -> Iterator[Any]:  # noqa: ANN401 - text, and spans
        """Yield the text and spans of a value; ``name`` is for errors."""
        schema = schema if isinstance(schema, Mapping) else {}
        kind = schema.get("type")
        if kind not in (None, *_KINDS):
            raise _refusal(f"the type {kind!r}", name)
        types, keywords = _KINDS.get(kind, (set(), set()))
        listed = next(({keyword} for keyword in ("const", "enum") if keyword in schema), set())
        for keyword in sorted(schema.keys() - _NOTES - (listed or keywords)):
            raise _refusal(keyword, name)
        if listed:
            options = [schema["const"]] if "const" in schema else list(schema["enum"])
            yield self._choice([option for option in options if kind is None or type(option) in types], name)
        elif kind == "object":
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
            raise _refusal("values of any type", name)

    def _object(self, schema: Mapping[str, Any], name: str) -> Iterator[str | Span]:
        """Yield the text and spans of an object. An optional property is left out where its span has spaces alone."""
        properties = schema.get("properties")
        required = {*schema.get("required", ())}
        if properties is None:
            raise _refusal("optional or unnamed properties", name)
        if not required <= properties.keys():
            raise _refusal("required properties without a schema", name)
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
                yield self._optional(before, parts, after, json.dumps(key))
        yield "}"

    def _array(self, schema: Mapping[str, Any], name: str) -> Iterator[str | Span]:
        """Yield the text and spans of an array. Items beyond the first and ``minItems`` may be left out."""
        fewest = schema.get("minItems", 0)
        most = math.floor(schema.get("maxItems", max(fewest, MAX_ITEMS)))
        if fewest > most:
            raise _refusal(f"minItems {fewest}", name)
        yield "["
        for i in range(most):
            parts = self._parts(schema.get("items"), f"the items of {name}")
            separator = ", " if i else ""
            if i < max(fewest, 1):
                yield separator
                yield from parts
            else:
                yield self._optional(separator, parts, "", name)
        yield "]"

    def _optional(self, before: str, parts: Iterable[str | Span], after: str, name: str) -> Span:
        """Return a span of a value and the text around it, or of spaces alone."""
        alternatives: list[list[Tensor]] = [[]]
        pieces = [before, *parts, after]
        if sum(not isinstance(piece, str) for piece in pieces) > 1:
            raise _refusal("an optional value that is an array or object", name)
        for piece in filter(None, pieces):
            texts = [[torch.tensor([token]) for token in self._encode(piece)]] if isinstance(piece, str) else piece
            alternatives = [[*alternative, *text] for alternative in alternatives for text in texts]
        return self._pad([*alternatives, []], name)

    def _choice(self, options: Sequence[object], name: str) -> str | Span:
        """Return the text of the only option, or a span of several options."""
        if not options:
            raise _refusal("no value", name)
        texts = [json.dumps(option) for option in options]
        if len(texts) == 1:
            return texts[0]
        return self._pad(([torch.tensor([token]) for token in self._encode(text)] for text in texts), name)

    def _string(self, fewest: float, most: float | None, name: str) -> Span:
        """Return a span of a string and its closing quote, with an alternative per number of tokens."""
        # Tokens have at most a quarter of the allowed characters, so a limit of characters becomes a limit of tokens.
        largest = int(self._sizes.max())
        largest = largest if most is None else max(1, min(largest, math.floor(most) // 4))
        num = MAX_STRING if most is None else min(math.floor(most) // largest, MAX_STRING)
        if fewest > num:
            raise _refusal(f"minLength {fewest}", name)
        body = ((self._sizes > 0) & (self._sizes <= largest)).nonzero()[:, 0]
        quote = self._token_set('"')
        return self._pad(([*[body] * i, quote] for i in range(math.ceil(fewest), num + 1)), name)

    def _number(self, schema: Mapping[str, Any], name: str) -> Span:
        """Return a span of an integer; if the type is ``number``, also of a number with up to two decimals."""
        high = math.floor(schema.get("maximum", max(MAX_NUMBER, schema.get("minimum", 0))))
        low = math.ceil(schema.get("minimum", min(-MAX_NUMBER, high)))
        if low > high:
            raise _refusal("no integer within its bounds", name)
        patterns = _numbers(low, high)
        if schema["type"] == "number":
            patterns = chain(patterns, _decimals(low, high))
        return self._pad(([self._token_set(*characters) for characters in pattern] for pattern in patterns), name)

    def _pad(self, alternatives: Iterable[Sequence[Tensor]], name: str) -> Span:
        """Return a span of alternatives padded with spaces; stops generating alternatives when there are too many."""
        span: list[Sequence[Tensor]] = []
        length = 0
        for alternative in alternatives:
            span.append(alternative)
            length = max(length, len(alternative))
            if length * len(span) > MAX_CHOICES:
                raise _refusal(f"more than {MAX_CHOICES} tokens of possible values", name)
        space = self._token_set(" ")
        return [[*alternative, *[space] * (length - len(alternative))] for alternative in span]

    def _token_set(self, *texts: str) -> Tensor:
        """Return the tokens whose text is among ``texts``."""
        if texts not in self._sets:
            ids = [token for text in texts for token in self._ids.get(text, ())]
            if not ids:
                names = ", ".join(map(repr, texts))
                message = f"json_schema: this tokenizer has no token for any of {names}; {_FIX}."
                raise OptionError(message, "json_schema")
            self._sets[texts] = torch.tensor(ids)
        return self._sets[texts]

    def _encode(self, text: str) -> list[int]:
        ids = encode_within(self._tokenizer, text)
        if "".join(self._texts[token] for token in ids) != text:
            message = f"json_schema: this tokenizer cannot write {text[:40]!r}; {_FIX}."
            raise OptionError(message, "json_schema")
        return ids


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
    """Yield patterns of integers: fixed digits, a range of digits, then any digits."""
    while low <= high:
        digits = str(low)
        free = 0
        while free + 1 < len(digits) and low % 10 ** (free + 1) == 0 and low + 10 ** (free + 1) - 1 <= high:
            free += 1
        first = int(digits[-free - 1])
        last = min(9, first + (high - low + 1) // 10**free - 1)
        yield [*digits[: -free - 1], _DIGITS[first : last + 1], *[_DIGITS] * free]
        low += (last - first + 1) * 10**free


def _refusal(what: str, name: str) -> OptionError:
    message = f"json_schema: a decoder that draws in any order cannot keep {what} in {name}; {_FIX}."
    return OptionError(message, "json_schema")
