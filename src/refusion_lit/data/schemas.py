"""Responses that keep a JSON schema by construction.

From left to right, llguidance says which tokens may follow, and the text is closed in time: a drawn token gives way if
what it opens could not be closed within the length limit. A decoder that draws in any order fills in a template
(:mod:`~refusion_lit.data.schema_templates`): what may stand at a place cannot depend on text to its left that is open.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
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
_BOUNDS = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_VALUES = ("const", "enum")
_UNREAD = ("default", "examples")
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
            _check_bounds(schema)
        except RecursionError as error:
            raise ValueError(f"{_OPTION}: this schema is nested too deeply; simplify it.") from error
        ends = sampling.stop or sampling.min_entropy
        require(not ends, _OPTION, "neither stop strings nor min_entropy, which cut a text", ends, "leave them out")
        if not decoder.is_left_to_right:
            self._templates = self._templates or Templates(self._tokenizer, self._special.vocab_size)
            given, filling = self._templates.of(schema)
            return [replace(prompt, given=given, constraint=filling) for prompt in prompts]
        self._vocabulary = self._vocabulary or _Vocabulary(self._tokenizer, self._special)
        grammar = _Grammar(self._vocabulary, self._vocabulary.compiled(schema))
        end = grammar.begin(_MAX_END).shortest_end(_MAX_END)
        fix = "simplify the schema, or bound its values"
        require(end is not None, _OPTION, f"an answer of at most {_MAX_END} tokens", "none that was found", fix)
        fewest = len(end or ())
        expected = f"at least {fewest}, the length of an answer that keeps the schema"
        require(fewest <= sampling.max_new_tokens, "max_new_tokens", expected, sampling.max_new_tokens, "raise it")
        return [replace(prompt, constraint=grammar) for prompt in prompts]


def _check_bounds(schema: object) -> None:
    """Refuse bounds and values that JSON has no number for, and sizes below 0; each error names the keyword."""
    if isinstance(schema, list | tuple):
        for each in schema:
            _check_bounds(each)
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        option = f"{_OPTION}: {keyword}"
        if keyword in _BOUNDS or (keyword in _EXCLUSIVE and not isinstance(value, bool)):  # which draft 4 has
            require(is_number(value, Real), option, "a number", value, "write one")
            number = _as_float(value)
            require(math.isfinite(number), option, "a finite number of 64 bits", number, "correct it, or leave it out")
        elif keyword in _SIZES:
            number = _as_float(value) if is_number(value, Real) else -1.0
            holds = 0 <= number < math.inf and number.is_integer()
            got = value if math.isfinite(number) else number
            require(holds, option, "an integer of at least 0", got, "correct it, or leave it out")
        elif keyword in _VALUES:
            try:
                json.dumps(value, allow_nan=False)
            except ValueError as error:
                message = f"{option}: expected values that JSON has, got another ({error}); write JSON alone."
                raise ValueError(message) from error
        elif keyword in _NAMED and isinstance(value, Mapping):
            _check_bounds([*value.values()])
        elif keyword not in _UNREAD:
            _check_bounds(value)


def _as_float(number: float) -> float:
    """Return a number as one of 64 bits; infinite if it is too large for that."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


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
        numbers: list[str] = []
        json.loads(text, parse_int=numbers.append, parse_float=numbers.append)
        largest = max((abs(float(number)) for number in numbers), default=0.0)
        require(largest < 2**53, _OPTION, "numbers below 2**53, as larger ones get rounded", largest, "use strings")
        grammar = ""
        try:
            grammar = str(self._library.LLMatcher.grammar_from_json_schema(text, overrides=_SEPARATORS))
            reason = self._library.LLMatcher.validate_grammar(grammar, self.tokenizer)
        except ValueError as error:
            reason = str(error)
        if reason:
            raise ValueError(f"{_OPTION}: this schema cannot be kept: {' '.join(reason.split())[:300]}; simplify it.")
        return grammar

    def matcher(self, grammar: str) -> Any:  # noqa: ANN401 - llguidance has no types of its own
        """Return a matcher at the beginning of a text."""
        return self._library.LLMatcher(self.tokenizer, grammar)


@dataclass(frozen=True)
class _Grammar(Constraint):
    """A compiled schema."""

    vocabulary: _Vocabulary
    grammar: str
    left_to_right = True

    def begin(self, max_length: int) -> _Matching:
        return _Matching(self.vocabulary, self.vocabulary.matcher(self.grammar), max_length)


class _Matching(ConstraintState):
    """A matcher and the tokens that it has read.

    It keeps an invariant: some end of the text, with EOS, fits into the length limit. A drawn token after which no end
    is found that fits gives way to the next token of the end that was found before it.
    """

    def __init__(self, vocabulary: _Vocabulary, matcher: Any, max_length: int) -> None:  # noqa: ANN401
        self._vocabulary = vocabulary
        self._matcher = matcher
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
        if token in self._vocabulary.ends or len(before) != place or not self._go_to(before):
            return token
        end = self._ends.pop(tuple(before), None) or self.shortest_end(_MAX_END)
        assert end, "the limit was checked, and every token keeps the invariant"
        following = end[1:]
        if token != end[0]:
            self._go_to([*before, token])
            found = self.shortest_end(self._max_length - place - 1)
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
        return end if end and end[-1] in self._vocabulary.ends and len(end) <= limit else None

    def _mask(self) -> Tensor:
        """Return which tokens may follow, bool [vocab]."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten()[: self._vocabulary.size].bool()

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Let the matcher read tokens; return whether they begin a text of the schema."""
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
