"""Grammars for decoders that sample from left to right, compiled from JSON schemas by llguidance."""

from __future__ import annotations

import importlib
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.constraints.schema_structure import OPTION
from refusion_lit.constraints.strict_schemas import EXACT, list_patterns
from refusion_lit.constraints.tool_calls import ToolFormat
from refusion_lit.data.encoding import split_added_tokens
from refusion_lit.types import ConstraintState, SpecialTokens
from refusion_lit.utils.require import OptionError, require

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
"""Byte orders, used in turn to complete a text. Bytes that end a value come first (but last within strings). With a
single order, a completion could repeat a byte forever, for example in a number above 0."""
MAX_COMPLETION = 2048
"""Maximum completion length in tokens."""
_LONG_NUMBER = re.compile(rb"([0-9]{150}|[eE][+-]?[0-9]{3,})\Z")
"""Matches the end when the last number may be infinite as a float."""
_MAX_PATTERNS = 100
"""Maximum number of different patterns in a schema: the search for a string's end may try all of them."""
_MAX_STATES = 4096
"""Maximum number of cached states for single strings; a pattern needs about 13 of them."""
_MAX_DEPTH = 64
"""Maximum nesting depth in a text, because parsers and validators are recursive."""


class GrammarCompiler:
    """Compiles JSON schemas to llguidance's grammars for a tokenizer.

    Attributes:
        eos_token_ids: EOS tokens.
        vocab_size: Vocabulary size.
        hub_tokenizer: transformers' tokenizer.
        tokenizer: llguidance's wrapper of the tokenizer.
        by_byte: Single-byte tokens by byte.
        byte_tokens: Single-byte tokens in every order from ``_BYTE_ORDERS``.
        quotes: The token for a double quote; empty if the vocabulary lacks it.
        percent: The token for ``%``, which JSON allows within strings only; ``None`` if the vocabulary lacks it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        try:
            self._library: Any = importlib.import_module("llguidance")
        except ImportError as error:
            message = f"{OPTION}: needs the package llguidance; run pip install llguidance."
            raise OptionError(message, OPTION) from error
        self.eos_token_ids = list(special.eos_token_ids)
        self.vocab_size = special.vocab_size
        self.hub_tokenizer = tokenizer
        # A byte-level tokenizer may put a space before every text, but llguidance encodes parts of a text.
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast tokenizers
        text = backend.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false')
        try:
            self.tokenizer = self._library.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)
        except ValueError as error:
            message = f"{OPTION}: a schema cannot be enforced with this tokenizer: {error}; leave the schema out."
            raise OptionError(message, OPTION) from error
        usable = [token for token in reversed(range(self.vocab_size)) if not self.tokenizer.is_special_token(token)]
        by_text = {self.tokenizer.decode_bytes([token]): token for token in usable}
        self.by_byte = {byte: by_text[bytes([byte])] for byte in range(256) if bytes([byte]) in by_text}
        orders = [dict.fromkeys([*order, *range(256)]) for order in _BYTE_ORDERS]  # every byte once
        self.byte_tokens = [[self.by_byte[byte] for byte in order if byte in self.by_byte] for order in orders]
        self.quotes = [by_text[text] for text in (b'"',) if text in by_text]
        self.percent = by_text.get(b"%")

    def compile(self, schema: object) -> str:
        """Return a strict schema's grammar.

        Raises:
            ValueError: If the schema is wrong or cannot be guaranteed.
        """
        if schema is False:  # perhaps because every value of an enum has control characters
            expected = "a schema that allows a value without control characters"
            raise OptionError(
                f"{OPTION}: expected {expected}, got a schema that allows no such value; change it.", OPTION
            )
        text = json.dumps({} if schema is True else schema)  # options of llguidance apply to objects only
        _check_numbers(text)
        try:
            grammar = str(self._library.LLMatcher.grammar_from_json_schema(text, overrides=_SEPARATORS))
            reason = self.make_matcher(grammar).get_error()
        except ValueError as error:
            grammar, reason = "", str(error)
        if reason:
            reason = " ".join(reason.partition("<backtrace>")[0].split())[:300]
            message = f"{OPTION}: this schema cannot be enforced: {reason}; simplify it."
            raise OptionError(message, OPTION)
        return grammar

    def compile_calls(self, schemas: Mapping[str, object], tool_format: ToolFormat, *, is_parallel: bool) -> str:
        """Return a grammar for calls.

        Args:
            schemas: Strict argument schemas by function name, accepted by :meth:`compile`.
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
        """Quote a text for a grammar; names of added tokens become tokens, as llguidance does not spell them."""
        parts = split_added_tokens(self.hub_tokenizer, text)
        ids: Any = self.hub_tokenizer.convert_tokens_to_ids([part for part, is_name in parts if is_name])
        numbers = iter(ids)
        return " ".join(f"<[{next(numbers)}]>" if is_name else json.dumps(part) for part, is_name in parts)

    def compile_string(self, schema: str, max_length: int) -> str | None:
        """Return a grammar for a strict schema's strings up to a length; ``None`` if no string is that short.

        Args:
            schema: The schema as JSON text.
            max_length: Maximum length in characters.
        """
        text = f'{{"type": "string", "allOf": [{schema}, {{"maxLength": {max_length}}}]}}'
        try:
            grammar = str(self._library.LLMatcher.grammar_from_json_schema(text, overrides=_SEPARATORS))
        except ValueError:
            return None
        return None if self.make_matcher(grammar).get_error() else grammar

    def make_matcher(self, grammar: str) -> Any:  # noqa: ANN401 - llguidance is not typed
        """Return a matcher for a new text."""
        return self._library.LLMatcher(self.tokenizer, grammar)


def _check_numbers(schema: str) -> None:
    """Refuse numbers that parsers round, or whose least common multiple overflows in llguidance.

    Args:
        schema: The schema as JSON text.
    """
    integers, fractions = list[str](), list[str]()
    json.loads(schema, parse_int=integers.append, parse_float=fractions.append)
    rounded = [number for number in fractions if float(EXACT.create_decimal(number)) != float(number)]
    rounded += [number for number in integers + fractions if abs(float(number)) >= 2**53]
    require(not rounded, OPTION, "numbers below 2**53, fractions of up to 15 digits", rounded, "use strings")
    multiples = [abs(int(number)) for number in re.findall(r'"multipleOf": (-?\d+)', schema)]
    # For an allOf, llguidance computes lcm(a, b) = a * b / gcd(a, b) in 32 bits: a is the least common multiple of the
    # numbers before b, and b is at most the largest number.
    largest = max(multiples, default=0)
    if any(multiple * largest >= 2**32 for multiple in accumulate(multiples, math.lcm)):
        message = f"{OPTION}: multipleOf: expected smaller or fewer numbers, got {multiples[:9]}; lower or drop some."
        raise OptionError(message, OPTION)


class StringEnds:
    """Finds short ends for strings with a pattern.

    With a pattern such as ``foo``, any character may follow any text, so a search that takes the first allowed
    character never reaches the end. The smallest maximum length with which the pattern can still be kept leaves only
    characters that lead to the end.

    Args:
        compiler: Compiles grammars for single strings.
        schemas: The strict schemas for the texts that contain the strings.
    """

    def __init__(self, compiler: GrammarCompiler, schemas: Iterable[object]) -> None:
        self._compiler = compiler
        self._schemas = [*{json.dumps(pattern): None for schema in schemas for pattern in list_patterns(schema)}]
        num = len(self._schemas)
        require(num <= _MAX_PATTERNS, OPTION, f"at most {_MAX_PATTERNS} different patterns", num, "use fewer")
        self._states: dict[tuple[str, int], GrammarState | None] = {}
        self._last_ends: dict[str, list[int]] = {}

    def find(self, tokens: Sequence[int], limit: int) -> Iterator[list[int]]:
        """Yield tokens that may close a string, if the text ends within a string.

        Parts of earlier ends come first: when a string grows, the rest of its last end often still fits.

        Args:
            tokens: The text's tokens.
            limit: Maximum length in tokens.
        """
        if not self._schemas:
            return
        text = re.sub(rb'"([^"\\]|\\.)*"', b"", self._compiler.tokenizer.decode_bytes([*tokens]))
        _, quote, string = text.partition(b'"')
        start = [self._compiler.by_byte.get(byte, -1) for byte in quote + string]
        if not quote or -1 in start:
            return
        for end in self._last_ends.values():
            yield from (end[i:] for i in range(len(end) - 1, -1, -1))
        length = len(re.sub(rb"\\.", b"x", string).decode(errors="ignore"))
        for schema in self._schemas:
            end = self._search(schema, start, length, limit)
            if end is not None:
                self._last_ends[schema] = end
                yield end

    def _search(self, schema: str, start: Sequence[int], length: int, limit: int) -> list[int] | None:
        """Return the shortest end found for a string that begins with tokens of ``length`` characters."""
        growths = [0, *(2**i for i in range(limit.bit_length()))]
        most = next((more for more in growths if self._begin(schema, length + more, start)), None)
        if most is None:
            return None
        lengths = range(length, length + most)
        num = bisect_left(lengths, True, key=lambda size: self._begin(schema, size, start) is not None)
        state = self._begin(schema, length + num, start)
        end = None if state is None else state.find_completion(limit + 1)
        return end and end[:-1]

    def _begin(self, schema: str, max_length: int, start: Sequence[int]) -> GrammarState | None:
        """Return a state after tokens that begin a string; ``None`` if no string up to ``max_length`` begins so."""
        key = schema, max_length
        if key not in self._states:
            if len(self._states) == _MAX_STATES:
                self._states.clear()
            grammar = self._compiler.compile_string(schema, max_length)
            self._states[key] = None if grammar is None else GrammarState(self._compiler, grammar, max_length)
        state = self._states[key]
        return state if state is not None and state.advance_to(start) else None


class GrammarState(ConstraintState):
    """A matcher and the tokens that it has consumed.

    Invariant: the text so far has a completion, EOS included, within the length limit. A sampled token is kept if such
    a completion follows it, and parsers can read the text: neither its depth nor a number is too large. Otherwise, the
    last known completion's next token replaces the sampled token.
    """

    def __init__(
        self, compiler: GrammarCompiler, grammar: str, max_length: int, schemas: Iterable[object] = ()
    ) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._string_ends = StringEnds(compiler, schemas)
        self._matcher = compiler.make_matcher(grammar)
        self._max_length = max_length
        self._consumed: list[int] = []
        self._completions: dict[tuple[int, ...], list[int]] = {}

    def allowed_tokens(self, place: int, before: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow a text; see :meth:`ConstraintState.allowed_tokens`."""
        if len(before) != place or not self.advance_to(before):
            return None  # after a draft that breaks the schema, or masks of a drafter
        mask = self._mask()
        if mask[self._compiler.eos_token_ids].any():
            mask[self._compiler.eos_token_ids] = True
        return mask

    def settle(self, place: int, before: Sequence[int], token: int) -> int:
        """Return a sampled token, or the token that replaces it; see :meth:`ConstraintState.settle`."""
        if len(before) != place or not self.advance_to(before):
            return token
        if token in self._compiler.eos_token_ids and self._matcher.is_accepting():
            return token
        known = self._completions.pop(tuple(before), None) or self.find_completion(MAX_COMPLETION)
        if not known:  # after a draft that the grammar accepts, but that is settled as another token
            return token
        following = known[1:]
        if token != known[0]:
            is_readable = self.advance_to([*before, token]) and self._is_readable()
            completion = self.find_completion(self._max_length - place - 1) if is_readable else None
            if completion is None:
                token = known[0]
            else:
                following = completion
        self._completions = {tuple(before): known, (*before, token): following}
        return token

    def find_completion(self, limit: int) -> list[int] | None:
        """Return at most ``limit`` tokens that complete the text, EOS included; ``None`` if none are found.

        Greedy search: every step takes the first allowed byte in an order from ``_BYTE_ORDERS``, but closes a string
        first; :class:`StringEnds` finds the characters that a string's pattern needs. The search may miss a completion,
        but every completion that it returns is valid.
        """
        completion: list[int] = []
        num_consumed = 0
        is_lost = False  # within a string whose end was not found
        eos_token_ids = self._compiler.eos_token_ids
        while len(completion) < limit:
            forced = [] if self._matcher.is_accepting() else self._matcher.compute_ff_tokens()
            mask = None if forced else self._mask()
            is_open = mask is not None and not mask[[*self._compiler.quotes, *eos_token_ids]].any()
            if is_open and not is_lost:
                ends = self._string_ends.find([*self._consumed, *completion], limit - len(completion))
                forced = next((end for end in ends if self._matcher.validate_tokens(end) == len(end)), [])
            is_lost = is_open and not forced
            if mask is not None and not forced:
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

    def advance_to(self, tokens: Sequence[int]) -> bool:
        """Move the matcher behind ``tokens``; return whether the schema allows a text that begins with them."""
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
