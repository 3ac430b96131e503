"""Responses that match a JSON schema by construction.

A decoder that samples from left to right follows a grammar, which llguidance compiles from the schema. Every sampled
token leaves a completion within the length limit; a token that does not is replaced. A decoder that samples in any
order fills in a template instead (:mod:`~refusion_lit.data.schema_templates`), because the tokens allowed at a place
cannot depend on text to its left that is not known yet.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Context, Decimal
from functools import cached_property, partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import split_added_tokens
from refusion_lit.data.schema_templates import TemplateCompiler
from refusion_lit.data.tool_calls import ToolFormat
from refusion_lit.engine.decoder import Decoder
from refusion_lit.types import Constraint, ConstraintState, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import OptionError, is_number, require

_SEPARATORS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf"\\',  # others would hide the name of a property
}
"""Options of llguidance."""
_ENDS = b'}]",:'
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BYTE_ORDERS = (_ENDS + b"@./0123456789-_+ " + _LETTERS, *[_ENDS + _LETTERS + b"9876543210@./-_+ "] * 2)
"""Orders in which bytes are tried to complete a text, used in turn. Bytes that end a value come first (but last within
strings). With a single order, a completion could repeat a byte forever, for example in a number above 0."""
_MAX_COMPLETION = 2048
"""Maximum number of tokens of a completion."""
_OPTION = "json_schema"
_LONG_NUMBER = re.compile(rb"([0-9]{150}|[eE][+-]?[0-9]{3,})\Z")
_MAX_DEPTH = 64  # of a text, because parsers and validators are recursive
_BOUNDS = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_VALUES = ("const", "enum")
_APPLICATORS = (*_VALUES, "allOf", "anyOf", "oneOf", "$ref")
_IGNORED = ("default", "examples")
_EXACT = Context(prec=15, Emin=-8)  # all parsers read decimals of this precision, from 1e-22 on, as the same floats
_AMBIGUOUS = re.compile(r"\\[DW]|\[\^[^]]*\\|\[\^?]?[^]]*(\[|&&|--|~~)|\(\?[^:=!<]")
"""Patterns that engines read differently; escapes other than ``\\d``, ``\\D``, ``\\w``, ``\\W`` are removed first."""
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LABEL = "[a-zA-Z0-9-]{1,63}"
_EXISTING: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}"},
    "time": {"pattern": f"^{_TIME}"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}"},
    "email": {"pattern": rf"^[^@]{{1,64}}@({_LABEL}\.)*{_LABEL}$", "maxLength": 254},
    "hostname": {"maxLength": 253},
}
"""Further keywords by format. llguidance alone allows 29 February in every year, the year 0, second 60 in every minute,
and longer names of hosts than there are."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value maps names, which are not keywords, to schemas."""


class Schemas:
    """Constrains prompts by JSON schemas.

    Args:
        tokenizer: The model's tokenizer.
        special: The model's special ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def constrain(
        self, prompts: Sequence[Prompt], schema: object, decoder: Decoder, sampling: SamplingParams
    ) -> list[Prompt]:
        """Return prompts whose responses parse as JSON and match a schema.

        Args:
            prompts: The prompts.
            schema: The schema, an object or a boolean.
            decoder: Samples from left to right, or keeps given text in place.
            sampling: Length limit and sampling options; stop strings are refused.

        Raises:
            ValueError: If the schema is wrong or cannot be guaranteed, the length limit is too low, or llguidance is
                needed and not installed.
        """
        _refuse_stop_strings(sampling)
        strict_schema = self._tighten(schema)
        if not decoder.is_left_to_right:
            return _fill(prompts, *self._template_compiler.compile(schema))
        return self._follow(prompts, self._grammar_compiler.compile(strict_schema), sampling)

    def constrain_calls(
        self,
        prompts: Sequence[Prompt],
        functions: Mapping[str, object],
        tool_format: ToolFormat,
        decoder: Decoder,
        sampling: SamplingParams,
        *,
        is_parallel: bool = False,
    ) -> list[Prompt]:
        """Return prompts whose responses are calls of functions.

        Args:
            prompts: The prompts.
            functions: Schemas of the arguments by the function's name.
            tool_format: How the model writes calls.
            decoder: Samples from left to right, or keeps given text in place.
            sampling: Length limit and sampling options; stop strings are refused.
            is_parallel: Whether a response may have several calls. Decoders in any order make one call.

        Raises:
            ValueError: As for :meth:`constrain`; an error about a function's schema names the function.
        """
        _refuse_stop_strings(sampling)
        grammars: dict[str, object] = {}
        for name, schema in functions.items():
            try:
                strict_schema = self._tighten(schema)
                if decoder.is_left_to_right:
                    self._grammar_compiler.compile(strict_schema)  # checks the function's schema alone
                grammars[name] = strict_schema
            except OptionError as error:
                if error.option != _OPTION:
                    raise
                raise OptionError(error.rename(f"{_OPTION}: {name}"), _OPTION) from error
        if not decoder.is_left_to_right:
            return _fill(prompts, *self._template_compiler.compile_call(functions, tool_format))
        grammar = self._grammar_compiler.compile_calls(grammars, tool_format, is_parallel=is_parallel)
        return self._follow(prompts, grammar, sampling)

    @cached_property
    def _grammar_compiler(self) -> _GrammarCompiler:
        return _GrammarCompiler(self._tokenizer, self._special)

    @cached_property
    def _template_compiler(self) -> TemplateCompiler:
        return TemplateCompiler(self._tokenizer, self._special.vocab_size)

    def _tighten(self, schema: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return a strict schema that implies the given schema."""
        require(isinstance(schema, Mapping | bool), _OPTION, "an object or a boolean", schema, "write a JSON schema")
        try:
            return _make_strict(schema)
        except RecursionError as error:
            raise OptionError(f"{_OPTION}: this schema is nested too deeply; simplify it.", _OPTION) from error

    def _follow(self, prompts: Sequence[Prompt], grammar: str, sampling: SamplingParams) -> list[Prompt]:
        """Return prompts whose responses follow a grammar."""
        begin = partial(_GrammarState, self._grammar_compiler, grammar)
        completion = begin(_MAX_COMPLETION).find_completion(_MAX_COMPLETION)
        fix = "simplify the schema, or bound its values"
        expected = f"an answer of at most {_MAX_COMPLETION} tokens"
        require(completion is not None, _OPTION, expected, "none that was found", fix)
        num_tokens = len(completion or ())
        expected = f"at least {num_tokens}, the length of an answer that keeps the schema"
        require(num_tokens <= sampling.max_new_tokens, "max_new_tokens", expected, sampling.max_new_tokens, "raise it")
        constraint = Constraint(begin=begin, left_to_right=True)
        return [replace(prompt, constraint=constraint) for prompt in prompts]


def _refuse_stop_strings(sampling: SamplingParams) -> None:
    require(not sampling.stop, _OPTION, "no stop strings, which cut a text", sampling.stop, "leave them out")


def _fill(prompts: Sequence[Prompt], given: tuple[int | None, ...], constraint: Constraint) -> list[Prompt]:
    """Return prompts whose responses fill a template."""
    return [replace(prompt, given=given, constraint=constraint) for prompt in prompts]


def _make_strict(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema that llguidance guarantees exactly and that implies the given schema.

    Raises:
        ValueError: If there is no such schema.
    """
    if not isinstance(schema, Mapping):
        return [_make_strict(item) for item in schema] if isinstance(schema, list | tuple) else schema
    strict: dict[str, Any] = {}
    for keyword in sorted(schema, key=_APPLICATORS.__contains__):  # llguidance reads the keywords around them apart
        value = schema[keyword]
        for is_valid, expected, got in _check_keyword(keyword, value, schema):
            if not is_valid:
                message = f"{_OPTION}: {keyword}: expected {expected}, got {got!r}; correct it, or leave it out."
                raise OptionError(message, _OPTION)
        if keyword in _NAMED and isinstance(value, Mapping):
            strict[keyword] = {name: _make_strict(item) for name, item in value.items()}
        elif keyword not in _IGNORED:
            strict[keyword] = value if keyword in _VALUES else _make_strict(value)
    for inclusive, tighter, following in (("minimum", max, _EXACT.next_plus), ("maximum", min, _EXACT.next_minus)):
        bound = strict.pop(f"exclusive{inclusive.title()}", False)
        bound = strict.get(inclusive, False) if bound is True else bound  # draft 4 has booleans
        if bound is not False:  # a number beyond the bound may be rounded to it, but not to the next exact number
            end = float(following(_EXACT.create_decimal(repr(float(bound)))))
            strict[inclusive] = tighter(end, strict.get(inclusive, end))
    more = _EXISTING.get(str(strict.get("format")))
    if more and isinstance(strict.get("allOf", []), list):
        strict["allOf"] = [more, *strict.get("allOf", [])]
    if not isinstance(strict.get("items"), list):
        strict.pop("additionalItems", None)  # meaningless here, but llguidance would skip prefixItems
    return strict


def _check_keyword(
    keyword: str,
    value: Any,  # noqa: ANN401
    schema: Mapping[str, Any],
) -> Iterator[tuple[bool, str, object]]:
    """Yield the checks of a keyword's value: whether the value passes, what is expected, and the value.

    A check may rely on the checks before it, so the caller stops at the first failure.
    """
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
    elif keyword == "format":
        yield value != "unknown", "a format that JSON schema defines", value  # llguidance ignores it
    elif keyword in ("pattern", "patternProperties"):
        for pattern in value if isinstance(value, Mapping) else [str(value)]:
            is_clear = not _AMBIGUOUS.search(re.sub(r"\\[^DWdw]", "x", str(pattern)))
            expected = r"patterns without \D, \W, [^\d], [^\w], (?i) and sets in classes, where engines differ"
            yield is_clear, expected, pattern
    elif keyword in _VALUES:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            message = f"{_OPTION}: {keyword}: expected values that JSON has, got another ({error}); write JSON alone."
            raise OptionError(message, _OPTION) from error


class _GrammarCompiler:
    """Compiles JSON schemas to llguidance's grammars for a tokenizer.

    Attributes:
        eos_token_ids: EOS tokens.
        vocab_size: Number of ids.
        hub_tokenizer: The tokenizer.
        tokenizer: The tokenizer as llguidance wraps it.
        byte_tokens: Tokens of single bytes, in each order of ``_BYTE_ORDERS``.
        quotes: The token of a double quote, or nothing.
        percent: Token that is allowed within strings only, if the vocabulary has it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        try:
            self._library: Any = importlib.import_module("llguidance")
            wrap: Any = importlib.import_module("llguidance.hf").from_tokenizer
        except ImportError as error:
            message = f"{_OPTION}: needs the package llguidance; run pip install llguidance."
            raise OptionError(message, _OPTION) from error
        self.eos_token_ids = list(special.eos_token_ids)
        self.vocab_size = special.vocab_size
        self.hub_tokenizer = tokenizer
        try:
            self.tokenizer = wrap(tokenizer, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)
        except ValueError as error:
            message = f"{_OPTION}: this tokenizer cannot keep a schema: {error}; leave it out."
            raise OptionError(message, _OPTION) from error
        usable = [token for token in reversed(range(self.vocab_size)) if not self.tokenizer.is_special_token(token)]
        by_text = {self.tokenizer.decode_bytes([token]): token for token in usable}
        by_byte = {byte: by_text[bytes([byte])] for byte in range(256) if bytes([byte]) in by_text}
        orders = [dict.fromkeys([*order, *range(256)]) for order in _BYTE_ORDERS]  # every byte once
        self.byte_tokens = [[by_byte[byte] for byte in order if byte in by_byte] for order in orders]
        self.quotes = [by_text[text] for text in (b'"',) if text in by_text]
        self.percent = by_text.get(b"%")

    def compile(self, schema: object) -> str:
        """Return a schema's grammar.

        Raises:
            ValueError: If the schema is wrong or cannot be guaranteed.
        """
        text = json.dumps({} if schema is True else schema)  # options of llguidance apply to objects only
        integers, fractions = list[str](), list[str]()
        json.loads(text, parse_int=integers.append, parse_float=fractions.append)
        rounded = [number for number in fractions if float(_EXACT.create_decimal(number)) != float(number)]
        rounded += [number for number in integers + fractions if abs(float(number)) >= 2**53]
        require(not rounded, _OPTION, "numbers below 2**53, fractions of up to 15 digits", rounded, "use strings")
        multiples = [abs(int(number)) for number in re.findall(r'"multipleOf": (-?\d+)', text)]
        product = math.lcm(*multiples) * max(multiples, default=0)  # llguidance multiplies an allOf's in 32 bits
        if product >= 2**32:
            message = f"{_OPTION}: multipleOf: expected smaller or fewer numbers, got {multiples}; lower or drop some."
            raise OptionError(message, _OPTION)
        try:
            grammar = str(self._library.LLMatcher.grammar_from_json_schema(text, overrides=_SEPARATORS))
            reason = self.make_matcher(grammar).get_error()
        except ValueError as error:
            grammar, reason = "", str(error)
        if reason:
            message = f"{_OPTION}: this schema cannot be kept: {' '.join(reason.split())[:300]}; simplify it."
            raise OptionError(message, _OPTION)
        return grammar

    def compile_calls(self, schemas: Mapping[str, object], tool_format: ToolFormat, *, is_parallel: bool) -> str:
        """Return the grammar of calls.

        Args:
            schemas: Strict schemas of the arguments by the function's name, which :meth:`compile` has taken.
            tool_format: How the model writes calls.
            is_parallel: Whether there may be several calls.
        """
        before, after = self._quote(tool_format.before_name), self._quote(tool_format.after_arguments)
        more = f"({self._quote(tool_format.between)} call)*" if is_parallel and tool_format.between else ""
        rules = [f"start: {self._quote(tool_format.begin)} call {more} {self._quote(tool_format.end)}"]
        rules.append("call: " + " | ".join(f"call{i}" for i in range(len(schemas))))
        for i, (name, schema) in enumerate(schemas.items()):
            options = {**({} if schema is True else schema), "x-guidance": _SEPARATORS}  # type: ignore[dict-item]
            rules.append(f"call{i}: {before} {self._quote(name + tool_format.after_name)} arguments{i} {after}")
            rules.append(f"arguments{i}: %json {json.dumps(options)}")
        return str(self._library.LLMatcher.grammar_from_lark("\n".join(rules)))

    def _quote(self, text: str) -> str:
        """Return a text in a grammar; names of added tokens become tokens, as llguidance does not spell them."""
        parts = split_added_tokens(self.hub_tokenizer, text)
        ids: Any = self.hub_tokenizer.convert_tokens_to_ids([part for part, is_name in parts if is_name])
        numbers = iter(ids)
        return " ".join(f"<[{next(numbers)}]>" if is_name else json.dumps(part) for part, is_name in parts)

    def make_matcher(self, grammar: str) -> Any:  # noqa: ANN401 - llguidance is not typed
        """Return a matcher at the beginning of a text."""
        return self._library.LLMatcher(self.tokenizer, grammar)


class _GrammarState(ConstraintState):
    """A matcher and the tokens that it has consumed.

    Invariant: the text so far has a completion, EOS included, within the length limit. A sampled token is replaced by
    the next token of the last known completion if no completion within the limit follows the sampled token, or if it
    makes the text too deep, or a number too long, for parsers.
    """

    def __init__(self, compiler: _GrammarCompiler, grammar: str, max_length: int) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._matcher = compiler.make_matcher(grammar)
        self._max_length = max_length
        self._consumed: list[int] = []
        self._completions: dict[tuple[int, ...], list[int]] = {}

    def allowed(self, place: int, before: Sequence[int]) -> Tensor | None:
        if len(before) != place or not self._advance_to(before):
            return None  # after a draft that breaks the schema, or masks of a drafter
        mask = self._mask()
        if mask[self._compiler.eos_token_ids].any():
            mask[self._compiler.eos_token_ids] = True
        return mask

    def settle(self, place: int, before: Sequence[int], token: int) -> int:
        if len(before) != place or not self._advance_to(before):
            return token
        if token in self._compiler.eos_token_ids and self._matcher.is_accepting():
            return token
        known = self._completions.pop(tuple(before), None) or self.find_completion(_MAX_COMPLETION)
        if not known:  # after a draft that the grammar accepts, but that is settled as another token
            return token
        following = known[1:]
        if token != known[0]:
            is_readable = self._advance_to([*before, token]) and self._is_readable()
            completion = self.find_completion(self._max_length - place - 1) if is_readable else None
            if completion is None:
                token = known[0]
            else:
                following = completion
        self._completions = {tuple(before): known, (*before, token): following}
        return token

    def find_completion(self, limit: int) -> list[int] | None:
        """Return tokens that complete the text, EOS included; ``None`` if none of at most ``limit`` are found.

        Greedy search: every step takes the first allowed byte in an order of ``_BYTE_ORDERS``, except that a string is
        closed first. The search may miss a completion, but whatever it returns is valid.
        """
        completion: list[int] = []
        num_consumed = 0
        eos_token_ids = self._compiler.eos_token_ids
        while len(completion) < limit:
            forced = [] if self._matcher.is_accepting() else self._matcher.compute_ff_tokens()
            if not forced:
                mask = self._mask()
                is_string = self._compiler.percent is not None and mask[self._compiler.percent]
                order = self._compiler.byte_tokens[(len(self._consumed) + num_consumed) % len(_BYTE_ORDERS)]
                first = [*self._compiler.quotes, *order[len(_ENDS) :]] if is_string else eos_token_ids
                choices = [*first, *order]
                forced = [token for token, fits in zip(choices, mask[choices].tolist(), strict=True) if fits][:1]
            if not forced or forced[0] in eos_token_ids:
                completion += forced
                break
            num_accepted = self._matcher.try_consume_tokens(forced)
            num_consumed += num_accepted
            completion += forced[:num_accepted]
            if num_accepted < len(forced):
                break
        self._matcher.rollback(num_consumed)
        is_complete = completion and completion[-1] in eos_token_ids and len(completion) <= limit
        return completion if is_complete and not self._matcher.is_error() else None

    def _is_readable(self) -> bool:
        """Return whether the text is not too deep for parsers, and its last number is finite as a float."""
        text = re.sub(rb'"([^"\\]|\\.)*"?', b"", self._compiler.tokenizer.decode_bytes(self._consumed))
        is_deep = sum((byte in b"[{") - (byte in b"]}") for byte in text) > _MAX_DEPTH
        return not is_deep and not _LONG_NUMBER.search(text[-200:])

    def _mask(self) -> Tensor:
        """Return which tokens may follow, bool [vocab]."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten()[: self._compiler.vocab_size].bool()

    def _advance_to(self, tokens: Sequence[int]) -> bool:
        """Move the matcher behind ``tokens``; return whether they begin a text of the schema."""
        if self._matcher.is_error():  # for good: nothing may follow what it consumed
            self._matcher, self._consumed = self._compiler.make_matcher(self._grammar), []
        common = 0
        while common < min(len(self._consumed), len(tokens)) and self._consumed[common] == tokens[common]:
            common += 1
        self._matcher.rollback(len(self._consumed) - common)
        del self._consumed[common:]
        rest = list(tokens[common:])
        if any(token >= self._compiler.vocab_size or token in self._compiler.eos_token_ids for token in rest):
            return False
        num_accepted = self._matcher.try_consume_tokens(rest)
        self._consumed += rest[:num_accepted]
        return num_accepted == len(rest)
