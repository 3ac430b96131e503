"""Responses that keep a JSON schema by construction.

From left to right, llguidance says which tokens may follow, and the text is closed in time: a drawn token gives way if
what it opens could not be closed within the length limit. A decoder that draws in any order fills in a template
(:mod:`~refusion_lit.data.schema_templates`): what may stand at a place cannot depend on text to its left that is open.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Context, Decimal
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.schema_templates import Templates
from refusion_lit.engine.decoder import Decoder
from refusion_lit.types import Constraint, ConstraintState, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import is_number, require

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ENDS = b'}]",:'
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CLOSING = (_ENDS + b"@./0123456789-_+ " + _LETTERS, *[_ENDS + _LETTERS + b"9876543210@./-_+ "] * 2)
"""Orders of bytes that are tried, in turn, to close a text: what ends something comes first, but in strings last. One
order alone would repeat a byte where another must follow, as in a number above 0 or in an address."""
_MAX_END = 2048
"""Maximum number of tokens of a text's shortest end that is looked for."""
_OPTION = "json_schema"
_LONG_NUMBER = re.compile(rb"([0-9]{150}|[eE][+-]?[0-9]{3,})\Z")
_MAX_DEPTH = 64  # of a text, as parsers and validators are recursive
_BOUNDS = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_VALUES = ("const", "enum")
_APPLICATORS = (*_VALUES, "allOf", "anyOf", "oneOf", "$ref")
_UNREAD = ("default", "examples")
_EXACT = Context(prec=15, Emin=-8)  # whose decimals all parsers read as the same floats, from 1e-22 on
_AMBIGUOUS = re.compile(r"\\[DW]|\[\^[^]]*\\|\[\^?]?[^]]*(\[|&&|--|~~)")
"""What engines read differently, in a pattern without escapes but ``\\d``, ``\\D``, ``\\w`` and ``\\W``."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value maps names, which are no keywords, to schemas."""


class Schemas:
    """Constrains prompts by JSON schemas.

    Args:
        tokenizer: The model's tokenizer.
        special: Its special ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._vocabulary: _Vocabulary | None = None
        self._templates: Templates | None = None

    def constrain(
        self, prompts: Sequence[Prompt], schema: object, decoder: Decoder, sampling: SamplingParams
    ) -> list[Prompt]:
        """Return prompts whose responses parse as JSON and keep a schema.

        Args:
            prompts: The prompts.
            schema: The schema, an object or a boolean.
            decoder: Draws from left to right, or keeps given text in place.
            sampling: Length limit and sampling options; may not end a response otherwise.

        Raises:
            ValueError: If the schema is wrong or has what cannot be guaranteed, the length limit is too low, or
                llguidance is needed and not installed.
        """
        require(isinstance(schema, Mapping | bool), _OPTION, "an object or a boolean", schema, "write a JSON schema")
        try:
            tightened = _tightened(schema)
        except RecursionError as error:
            raise ValueError(f"{_OPTION}: this schema is nested too deeply; simplify it.") from error
        ends = sampling.stop or sampling.min_entropy
        require(not ends, _OPTION, "neither stop strings nor min_entropy, which cut a text", ends, "leave them out")
        if not decoder.is_left_to_right:
            self._templates = self._templates or Templates(self._tokenizer, self._special.vocab_size)
            given, constraint = self._templates.of(schema)
            return [replace(prompt, given=given, constraint=constraint) for prompt in prompts]
        self._vocabulary = self._vocabulary or _Vocabulary(self._tokenizer, self._special)
        begin = partial(_Matching, self._vocabulary, self._vocabulary.compiled(tightened))
        end = begin(_MAX_END).shortest_end(_MAX_END)
        fix = "simplify the schema, or bound its values"
        require(end is not None, _OPTION, f"an answer of at most {_MAX_END} tokens", "none that was found", fix)
        fewest = len(end or ())
        expected = f"at least {fewest}, the length of an answer that keeps the schema"
        require(fewest <= sampling.max_new_tokens, "max_new_tokens", expected, sampling.max_new_tokens, "raise it")
        constraint = Constraint(begin=begin, left_to_right=True)
        return [replace(prompt, constraint=constraint) for prompt in prompts]


def _tightened(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema that llguidance keeps exactly, and whose values keep the given one; refuse what has none."""
    if not isinstance(schema, Mapping):
        return [_tightened(each) for each in schema] if isinstance(schema, list | tuple) else schema
    found: dict[str, Any] = {}
    for keyword in sorted(schema, key=_APPLICATORS.__contains__):  # llguidance reads the keywords around them apart
        value = schema[keyword]
        for holds, expected, got in _claims(keyword, value, schema):
            require(holds, f"{_OPTION}: {keyword}", expected, got, "correct it, or leave it out")
        if keyword in _NAMED and isinstance(value, Mapping):
            found[keyword] = {name: _tightened(each) for name, each in value.items()}
        elif keyword not in _UNREAD:
            found[keyword] = value if keyword in _VALUES else _tightened(value)
    for inclusive, tighter, following in (("minimum", max, _EXACT.next_plus), ("maximum", min, _EXACT.next_minus)):
        bound = found.pop(f"exclusive{inclusive.title()}", False)
        bound = found.get(inclusive, False) if bound is True else bound  # draft 4 has booleans
        if bound is not False:  # a number beyond it may be rounded to it, but not to the next exact one
            end = float(following(_EXACT.create_decimal(repr(float(bound)))))
            found[inclusive] = tighter(end, found.get(inclusive, end))
    if not isinstance(found.get("items"), list):
        found.pop("additionalItems", None)  # it has no meaning here, but llguidance would skip prefixItems
    return found


def _claims(keyword: str, value: Any, schema: Mapping[str, Any]) -> Iterator[tuple[bool, str, object]]:  # noqa: ANN401
    """Yield what must hold for the value of a schema's keyword: whether it does, what is expected, and the value."""
    if keyword == "x-guidance" or (keyword == "$schema" and "/draft-03/" in str(value)):
        yield False, "draft 4 or later, without options of llguidance", value
    elif keyword in _BOUNDS or (keyword in _EXCLUSIVE and not isinstance(value, bool)):
        yield is_number(value, Real), "a number", value
        number = float(Decimal(value))  # infinite if it is too large for a float
        yield math.isfinite(number), "a finite number of 64 bits", number
        yield keyword != "multipleOf" or isinstance(value, Integral), "an integer, as floats are rounded", value
    elif keyword in _SIZES:
        number = float(Decimal(value)) if is_number(value, Real) else -1.0
        is_size = 0 <= number < math.inf and number.is_integer()
        yield is_size, "an integer of at least 0", value if math.isfinite(number) else number
        names = schema.get("required")
        most = 1 + len({*map(str, names)} if isinstance(names, list | tuple) else ())
        yield keyword != "minProperties" or number <= most, f"at most {most}: required names and one more", value
    elif keyword in ("pattern", "patternProperties"):
        for each in value if isinstance(value, Mapping) else [str(value)]:
            is_clear = not _AMBIGUOUS.search(re.sub(r"\\[^DWdw]", "x", str(each)))
            yield is_clear, r"patterns without \D, \W, [^\d], [^\w] and sets in classes, where engines differ", each
    elif keyword in _VALUES:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            message = f"{_OPTION}: {keyword}: expected values that JSON has, got another ({error}); write JSON alone."
            raise ValueError(message) from error


class _Vocabulary:
    """A tokenizer as llguidance knows it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        try:
            self._library: Any = importlib.import_module("llguidance")
            wrap: Any = importlib.import_module("llguidance.hf").from_tokenizer
        except ImportError as error:
            raise ValueError(f"{_OPTION}: needs the package llguidance; run pip install llguidance.") from error
        self.ends = list(special.eos_token_ids)
        self.size = special.vocab_size
        try:
            self.tokenizer = wrap(tokenizer, n_vocab=self.size, eos_token=self.ends)
        except ValueError as error:
            raise ValueError(f"{_OPTION}: this tokenizer cannot keep a schema: {error}; leave it out.") from error
        usable = [token for token in reversed(range(self.size)) if not self.tokenizer.is_special_token(token)]
        by_text = {self.tokenizer.decode_bytes([token]): token for token in usable}
        found = {byte: by_text[bytes([byte])] for byte in range(256) if bytes([byte]) in by_text}
        orders = [dict.fromkeys([*order, *range(256)]) for order in _CLOSING]  # each byte once
        self.closing = [[found[byte] for byte in order if byte in found] for order in orders]
        self.quotes = [by_text[text] for text in (b'"',) if text in by_text]
        self.percent = by_text.get(b"%")  # possible within strings only

    def compiled(self, schema: object) -> str:
        """Return the grammar of a schema.

        Raises:
            ValueError: If the schema is wrong, or has what cannot be kept.
        """
        text = json.dumps({} if schema is True else schema)  # options of llguidance go to objects only
        numbers, fractions = list[str](), list[str]()
        json.loads(text, parse_int=numbers.append, parse_float=fractions.append)
        rounded = [each for each in fractions if float(_EXACT.create_decimal(each)) != float(each)]
        rounded += [each for each in numbers + fractions if abs(float(each)) >= 2**53]
        require(not rounded, _OPTION, "numbers below 2**53, fractions of up to 15 digits", rounded, "use strings")
        multiples = [abs(int(each)) for each in re.findall(r'"multipleOf": (-?\d+)', text)]
        product = math.lcm(*multiples) * max(multiples, default=0)  # llguidance multiplies those of an allOf in 32 bits
        require(product < 2**32, f"{_OPTION}: multipleOf", "smaller or fewer numbers", multiples, "lower or drop some")
        grammar = ""
        try:
            options = _SEPARATORS | {"json_allowed_escapes": 'nrbtf"\\'}  # others would hide the name of a property
            grammar = str(self._library.LLMatcher.grammar_from_json_schema(text, overrides=options))
            reason = self.matcher(grammar).get_error()
        except ValueError as error:
            reason = str(error)
        if reason:
            raise ValueError(f"{_OPTION}: this schema cannot be kept: {' '.join(reason.split())[:300]}; simplify it.")
        return grammar

    def matcher(self, grammar: str) -> Any:  # noqa: ANN401 - llguidance has no types of its own
        """Return a matcher at the beginning of a text."""
        return self._library.LLMatcher(self.tokenizer, grammar)


class _Matching(ConstraintState):
    """A matcher and the tokens that it has read.

    It keeps an invariant: some end of the text, with EOS, fits into the length limit. A drawn token after which no end
    is found that fits gives way to the next token of the end that was found before it. So does one that makes the text
    too deep, or a number too long, for parsers.
    """

    def __init__(self, vocabulary: _Vocabulary, grammar: str, max_length: int) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._matcher = vocabulary.matcher(grammar)
        self._max_length = max_length
        self._read: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def allowed(self, place: int, before: Sequence[int]) -> Tensor | None:
        if len(before) != place or not self._go_to(before):
            return None  # after a draft that breaks the schema, or masks of a drafter
        mask = self._mask()
        if mask[self._vocabulary.ends].any():
            mask[self._vocabulary.ends] = True
        return mask

    def settle(self, place: int, before: Sequence[int], token: int) -> int:
        if len(before) != place or not self._go_to(before):
            return token
        if token in self._vocabulary.ends and self._matcher.is_accepting():
            return token
        end = self._ends.pop(tuple(before), None) or self.shortest_end(_MAX_END)
        if not end:  # after a draft that the grammar takes, but which settles as another token
            return token
        following = end[1:]
        if token != end[0]:
            fits = self._go_to([*before, token]) and self._is_readable()
            found = self.shortest_end(self._max_length - place - 1) if fits else None
            token = end[0] if found is None else token
            following = following if found is None else found
        self._ends = {tuple(before): end, (*before, token): following}
        return token

    def shortest_end(self, limit: int) -> list[int] | None:
        """Return tokens that end the text here, EOS included; ``None`` if none of at most ``limit`` are found.

        At each step the first possible byte of an order in ``_CLOSING`` is taken, but the quote within strings, so it
        may miss an end, but never errs.
        """
        end: list[int] = []
        num_read = 0
        while len(end) < limit:
            forced = [] if self._matcher.is_accepting() else self._matcher.compute_ff_tokens()
            if not forced:
                mask = self._mask()
                is_string = self._vocabulary.percent is not None and mask[self._vocabulary.percent]
                order = self._vocabulary.closing[(len(self._read) + num_read) % len(_CLOSING)]
                first = [*self._vocabulary.quotes, *order[len(_ENDS) :]] if is_string else self._vocabulary.ends
                choices = [*first, *order]
                forced = [token for token, fits in zip(choices, mask[choices].tolist(), strict=True) if fits][:1]
            if not forced or forced[0] in self._vocabulary.ends:
                end += forced
                break
            taken = self._matcher.try_consume_tokens(forced)
            num_read += taken
            end += forced[:taken]
            if taken < len(forced):
                break
        self._matcher.rollback(num_read)
        is_end = end and end[-1] in self._vocabulary.ends and len(end) <= limit
        return end if is_end and not self._matcher.is_error() else None

    def _is_readable(self) -> bool:
        """Whether the text read is not too deep for parsers, and its last number finite as a float."""
        text = re.sub(rb'"([^"\\]|\\.)*"?', b"", self._vocabulary.tokenizer.decode_bytes(self._read))
        is_deep = sum((byte in b"[{") - (byte in b"]}") for byte in text) > _MAX_DEPTH
        return not is_deep and not _LONG_NUMBER.search(text[-200:])

    def _mask(self) -> Tensor:
        """Return which tokens may follow, bool [vocab]."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten()[: self._vocabulary.size].bool()

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Let the matcher read tokens; return whether they begin a text of the schema."""
        if self._matcher.is_error():  # for good: after what it read nothing may follow
            self._matcher, self._read = self._vocabulary.matcher(self._grammar), []
        common = 0
        while common < min(len(self._read), len(tokens)) and self._read[common] == tokens[common]:
            common += 1
        self._matcher.rollback(len(self._read) - common)
        del self._read[common:]
        rest = list(tokens[common:])
        if any(token >= self._vocabulary.size or token in self._vocabulary.ends for token in rest):
            return False
        taken = self._matcher.try_consume_tokens(rest)
        self._read += rest[:taken]
        return taken == len(rest)
