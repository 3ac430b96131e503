"""Answers that keep a JSON schema by construction: as a token mask left to right, as a template in any order.

Left to right, llguidance says which tokens may follow, and the answer is closed in time: a token is replaced if what it
opens could not be closed within the length limit. In any order, the schema's fixed text is given, and each value is a
span that holds only tokens of its kind. What neither can guarantee is refused before work starts.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_text
from refusion_lit.data.templates import MAX_LENGTHS
from refusion_lit.engine.decoder import Decoder
from refusion_lit.types import Constraint, ConstraintState, Prompt, SpecialTokens
from refusion_lit.utils.require import require

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CLOSING = b'}]",:0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.@/+ '
"""Bytes in the order in which they are tried to close a text: what ends something comes first."""
_MAX_CLOSING = 2048
"""Maximum number of tokens of a text's shortest end that is looked for."""
_LENGTHS = {"string": (2, 4, 1, 6, 3, 8, 5, 12), "integer": (2, 1, 3, 4)}
"""Numbers of tokens that are tried for a value in a template, the first ones where few combinations are left."""
_OPTION = "json_schema"

Schema = Mapping[str, Any] | bool


class Schemas:
    """Constrains prompts by JSON schemas.

    Args:
        tokenizer: The model's tokenizer.
        special: Its special ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._grammars: _Grammars | None = None
        self._pieces: list[str] = []

    def prompts(self, prompt: Prompt, schema: Schema, decoder: Decoder, max_new_tokens: int) -> list[Prompt]:
        """Return a prompt whose answers keep a schema; several candidates if the lengths of its values are open.

        Args:
            prompt: The prompt.
            schema: The schema.
            decoder: Must draw from left to right, or keep given tokens in place.
            max_new_tokens: Maximum number of generated tokens.

        Raises:
            ValueError: If the answer cannot be guaranteed to keep the schema, with the reason.
        """
        require(isinstance(schema, Mapping | bool), _OPTION, "an object or a boolean", schema, "write a JSON schema")
        if decoder.is_left_to_right:
            self._grammars = self._grammars or _Grammars(self._tokenizer, self._special)
            constraint = _Grammar(self._grammars, self._grammars.compiled(schema))
            constraint.check(max_new_tokens)
            return [replace(prompt, constraint=constraint)]
        found = []
        for given, masks in self._templates(schema):
            candidate = replace(prompt, given=given, constraint=_Places(masks))
            if candidate.num_holes <= max_new_tokens:
                found.append(candidate)
        fewest = min((sum(token is None for token in given) for given, _ in self._templates(schema)), default=0)
        require(bool(found), "max_new_tokens", f"at least {fewest} for this schema", max_new_tokens, "raise it")
        reason = decoder.refusal(found[0])
        if reason is not None:
            name = type(decoder).__name__
            raise ValueError(
                f"{_OPTION}: {name} cannot keep the schema's text in place: {reason}; use another decoder."
            )
        return found

    def _templates(self, schema: Schema) -> Iterator[tuple[tuple[int | None, ...], dict[int, Tensor]]]:
        """Yield the response's given tokens and its values' masks by place, for each combination of lengths."""
        parts = list(_joined(_template(schema, "the schema", self._single)))
        spans = [part for part in parts if not isinstance(part, str)]
        breadth = max(int(MAX_LENGTHS ** (1 / max(sum(len(span.lengths) > 1 for span in spans), 1)) + 1e-9), 1)
        eos = int(self._tokenizer.eos_token_id)  # type: ignore[arg-type]
        for lengths in product(*(sorted(span.lengths[:breadth]) for span in spans)):
            sizes = iter(lengths)
            given: list[int | None] = []
            masks: dict[int, Tensor] = {}
            for part in parts:
                if isinstance(part, str):
                    given += encode_text(self._tokenizer, part)
                    continue
                for number in range(size := next(sizes)):
                    masks[len(given)] = self._mask(part, number, size)
                    given.append(None)
            yield (*given, eos), masks

    def _mask(self, span: _Span, number: int, size: int) -> Tensor:
        """Return which tokens may stand at a place of a span of ``size`` tokens."""
        if span.ids:
            allowed = [token in span.ids for token in range(self._special.vocab_size)]
        elif span.kind == "string":
            most = max((span.max_length or 1_000_000) // size, 1)
            allowed = [0 < len(piece) <= most and _is_plain(piece) for piece in self._texts()]
        else:
            digits = "123456789" if number == 0 and (size > 1 or span.positive) else "0123456789"
            allowed = [len(piece) == 1 and piece in digits for piece in self._texts()]
        mask = torch.tensor(allowed)
        fix = "use another tokenizer"
        require(bool(mask.any()), _OPTION, f"tokens that a {span.kind} is made of", "none in the vocabulary", fix)
        return mask

    def _texts(self) -> list[str]:
        """Return the text of every token within a text; empty for special ones."""
        if not self._pieces:
            backend: Any = self._tokenizer.backend_tokenizer  # type: ignore[attr-defined]
            special = set(self._tokenizer.all_special_ids)
            known = range(self._special.vocab_size)
            # After another token: some tokenizers drop the space from a text's first token.
            first = encode_text(self._tokenizer, "1")
            start = backend.decode(first)
            self._pieces = [
                "" if token in special else backend.decode([*first, token]).removeprefix(start) for token in known
            ]
        return self._pieces

    def _single(self, text: str) -> int | None:
        """Return the one token that a text is encoded as; ``None`` if it is several."""
        ids = encode_text(self._tokenizer, text)
        return ids[0] if len(ids) == 1 else None


def _is_plain(piece: str) -> bool:
    """Whether a token's text may stand in a JSON string as it is."""
    return "\N{REPLACEMENT CHARACTER}" not in piece and json.dumps(piece, ensure_ascii=False) == f'"{piece}"'


# Left to right.


class _Grammars:
    """Compiles schemas for a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens) -> None:
        try:
            self._library: Any = importlib.import_module("llguidance")
            wrap: Any = importlib.import_module("llguidance.hf").from_tokenizer
        except ImportError as error:
            raise ValueError(f"{_OPTION}: needs the package llguidance; pip install 'refusion-lit[serve]'.") from error
        self.ends = list(special.eos_token_ids)
        self.vocab_size = special.vocab_size
        self.tokenizer = wrap(tokenizer, n_vocab=special.vocab_size, eos_token=self.ends)
        singles = {self.tokenizer.decode_bytes([token]): token for token in reversed(range(special.vocab_size))
                   if not self.tokenizer.is_special_token(token)}  # fmt: skip
        order = [*_CLOSING, *sorted(set(range(256)) - {*_CLOSING})]
        self.closing = [singles[bytes([byte])] for byte in order if bytes([byte]) in singles]
        self.quote = singles.get(b'"', -1)
        self.percent = singles.get(b"%", -1)  # possible within strings only

    def compiled(self, schema: Schema) -> str:
        """Return the grammar of a schema.

        Raises:
            ValueError: If the schema is wrong, or has what cannot be kept.
        """
        text = json.dumps(schema if isinstance(schema, bool) else dict(schema))
        grammar = ""
        try:
            grammar = str(self._library.LLMatcher.grammar_from_json_schema(text, overrides=_SEPARATORS))
            reason = self._library.LLMatcher.validate_grammar(grammar, self.tokenizer)
        except ValueError as error:
            reason = str(error)
        if reason:
            raise ValueError(f"{_OPTION}: this schema cannot be kept: {' '.join(reason.split())[:300]}.")
        return grammar

    def matcher(self, grammar: str) -> Any:  # noqa: ANN401 - llguidance has no types of its own
        """Return a matcher at the beginning of a text."""
        return self._library.LLMatcher(self.tokenizer, grammar)


@dataclass(frozen=True)
class _Grammar(Constraint):
    """A compiled schema."""

    grammars: _Grammars
    grammar: str
    left_to_right = True

    def begin(self, max_length: int) -> _Matching:
        return _Matching(self.grammars, self.grammars.matcher(self.grammar), max_length)

    def check(self, max_length: int) -> None:
        """Refuse a length limit that the shortest answer found does not fit into."""
        end = self.begin(_MAX_CLOSING).shortest_end()
        fix = "simplify the schema, or bound its values"
        require(end is not None, _OPTION, f"an answer of at most {_MAX_CLOSING} tokens", "none that was found", fix)
        assert end is not None
        expected = f"at least {len(end)}, the length of an answer that keeps the schema"
        require(len(end) <= max_length, "max_new_tokens", expected, max_length, "raise it")


class _Matching(ConstraintState):
    """A matcher and the tokens that it has read.

    It keeps an invariant: some end of the text, with EOS, fits into the length limit. A drawn token after which no end
    is found that fits gives way to the next token of the end that was found before it.
    """

    def __init__(self, grammars: _Grammars, matcher: Any, max_length: int) -> None:  # noqa: ANN401
        self._grammars = grammars
        self._matcher = matcher
        self._max_length = max_length
        self._read: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def allowed(self, place: int, before: Sequence[int]) -> Tensor | None:
        if len(before) != place or not self._go_to(before):
            return None  # after a draft that breaks the schema, or masks of a drafter
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._grammars.vocab_size].astype(bool))
        if mask[self._grammars.ends].any():
            mask[self._grammars.ends] = True
        return mask

    def settle(self, place: int, before: Sequence[int], token: int) -> int:
        if token in self._grammars.ends or len(before) != place or not self._go_to(before):
            return token
        end = self._ends.pop(tuple(before), None)
        if end is None:
            end = self.shortest_end()
        assert end, "the limit was checked, and every token keeps the invariant"
        if token == end[0]:
            following = end[1:]
        else:
            self._go_to([*before, token])
            found = self.shortest_end(self._max_length - place - 1)
            following = end[1:] if found is None else found
            token = end[0] if found is None else token
        self._ends = {tuple(before): end, (*before, token): following}
        return token

    def shortest_end(self, most: int = _MAX_CLOSING) -> list[int] | None:
        """Return tokens that end the text here, EOS included; ``None`` if none of at most ``most`` are found.

        At each step the first possible byte of ``_CLOSING`` is taken, but the quote within strings, so it may miss an
        end, but never errs.
        """
        matcher = self._matcher
        end: list[int] = []
        while len(end) < most:
            forced = [] if matcher.is_accepting() else matcher.compute_ff_tokens()
            if not forced:
                bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                choices = [*self._grammars.ends, *self._grammars.closing]
                if _is_set(bits, self._grammars.percent):
                    choices.insert(0, self._grammars.quote)
                next_token = next((token for token in choices if _is_set(bits, token)), None)
                if next_token is None or next_token in self._grammars.ends:
                    end += [] if next_token is None else [next_token]
                    break
                forced = [next_token]
            taken = matcher.try_consume_tokens(forced)
            end += forced[:taken]
            if taken < len(forced):
                break
        is_whole = bool(end) and end[-1] in self._grammars.ends and len(end) <= most
        matcher.rollback(len(end) - (end[-1:] != [] and end[-1] in self._grammars.ends))
        return end if is_whole else None

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Let the matcher read tokens; return whether they begin a text of the schema."""
        common = next((i for i, pair in enumerate(zip(self._read, tokens, strict=False)) if pair[0] != pair[1]),
                      min(len(self._read), len(tokens)))  # fmt: skip
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
            del self._read[common:]
        rest = list(tokens[common:])
        if any(token >= self._grammars.vocab_size or token in self._grammars.ends for token in rest):
            return False
        taken = self._matcher.try_consume_tokens(rest)
        self._read += rest[:taken]
        return taken == len(rest)


def _is_set(bits: np.ndarray, token: int) -> bool:
    return token >= 0 and bool(bits[token >> 3] >> (token & 7) & 1)


# In any order.


@dataclass(frozen=True, kw_only=True)
class _Span:
    """A value to fill in.

    Attributes:
        kind: ``string`` (what is between the quotes), ``integer`` or ``choice``.
        lengths: Numbers of tokens that it may have, the preferred ones first.
        ids: For a choice, the token of each value.
        max_length: For a string, its maximum number of characters.
        positive: For an integer, whether it must not be 0.
    """

    kind: str
    lengths: tuple[int, ...]
    ids: frozenset[int] = frozenset()
    max_length: int | None = None
    positive: bool = False


@dataclass(frozen=True)
class _Places(Constraint, ConstraintState):
    """Which tokens may stand at the places of a template's spans."""

    masks: Mapping[int, Tensor]
    left_to_right = False

    def begin(self, max_length: int) -> _Places:  # noqa: ARG002
        return self

    def allowed(self, place: int, before: Sequence[int]) -> Tensor | None:  # noqa: ARG002
        return self.masks.get(place)


_TAKEN = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "type", "additionalProperties",
          "required"}  # fmt: skip


def _template(schema: Schema, where: str, single: Any) -> Iterator[str | _Span]:  # noqa: ANN401 - a function
    """Yield the text and spans of a value that keeps a schema.

    Raises:
        ValueError: If there is no template that guarantees it.
    """
    values = {} if isinstance(schema, bool) else schema
    kind = values.get("type")
    taken = {"object": {"properties"}, "array": {"items", "minItems", "maxItems", "prefixItems"},
             "string": {"minLength", "maxLength"}, "integer": {"minimum", "maximum"}, "number": {"minimum", "maximum"},
             }.get(str(kind), set())  # fmt: skip
    unknown = sorted(set(values) - _TAKEN - taken - {"const", "enum"})
    fix = "use a decoder that writes from left to right, such as Autoregressive"
    require(not unknown, _OPTION, f"keywords that a template can keep in {where}", ", ".join(unknown), fix)
    if "const" in values or len(values.get("enum", ())) == 1:
        yield json.dumps(values["const"] if "const" in values else values["enum"][0], ensure_ascii=False)
    elif "enum" in values or kind == "boolean":
        yield from _choice(values.get("enum", [True, False]), where, single, fix)
    elif kind == "object":
        properties = values.get("properties", {})
        missing = sorted(set(values.get("required", ())) - set(properties))
        require(not missing, _OPTION, f"all required properties in properties of {where}", missing, "describe them")
        for number, (name, own) in enumerate(properties.items()):
            yield f"{', ' if number else '{'}{json.dumps(name, ensure_ascii=False)}: "
            yield from _template(own, name, single)
        yield "}" if properties else "{}"
    elif kind == "array":
        items = list(values.get("prefixItems", ()))
        number = values.get("minItems", len(items))
        is_fixed = number == values.get("maxItems") or (items and values.get("items") is False)
        require(bool(is_fixed), _OPTION, f"a fixed number of items in {where}", "an open one", fix)
        items += [values.get("items", True)] * (number - len(items))
        for place, own in enumerate(items[:number]):
            yield ", " if place else "["
            yield from _template(own, f"an item of {where}", single)
        yield "]" if number else "[]"
    elif kind == "string":
        least = values.get("minLength", 1)
        most = values.get("maxLength", 1_000_000)
        lengths = tuple(n for n in (*_LENGTHS["string"], least) if least <= n <= most)
        require(bool(lengths), _OPTION, f"a string of at least one character in {where}", "none", fix)
        yield '"'
        yield _Span(kind="string", lengths=tuple(dict.fromkeys(lengths)), max_length=values.get("maxLength"))
        yield '"'
    elif kind in ("integer", "number"):
        low = values.get("minimum", 0)
        high = values.get("maximum", 10**9)
        lengths = tuple(n for n in _LENGTHS["integer"] if (10 ** (n - 1) if n > 1 else int(low > 0)) >= low
                        and 10**n - 1 <= high)  # fmt: skip
        expected = f"bounds between which all numbers of some number of digits are, in {where}"
        require(bool(lengths), _OPTION, expected, f"{low} to {high}", fix)
        yield _Span(kind="integer", lengths=lengths, positive=low > 0)
    elif kind == "null":
        yield "null"
    else:
        raise ValueError(f"{_OPTION}: expected one type in {where}, got {kind!r}; {fix}.")


def _choice(values: Sequence[object], where: str, single: Any, fix: str) -> Iterator[str | _Span]:  # noqa: ANN401
    """Yield a span of one token that is one of several values."""
    are_texts = all(isinstance(value, str) for value in values)
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    found = [single(text[1:-1] if are_texts else text) for text in texts]
    require(None not in found, _OPTION, f"values of one token each in {where}", ", ".join(texts), fix)
    quote = '"' if are_texts else ""
    yield quote
    yield _Span(kind="choice", lengths=(1,), ids=frozenset(found))
    yield quote


def _joined(parts: Iterator[str | _Span]) -> Iterator[str | _Span]:
    """Yield the parts with neighbouring texts in one."""
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if text:
            yield text
        text = ""
        yield part
    if text:
        yield text
