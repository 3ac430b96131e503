"""Decodes a response as a part of the whole text: prompt text + response text = text of all tokens.

Some tokenizers decode a token differently when it begins a text: SentencePiece drops the space before the first
word. A response is therefore decoded together with its prompt's last tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from itertools import groupby, islice
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.added_tokens import read_added_tokens
from refusion_lit.data.encoding import encode_text
from refusion_lit.modeling.vocabulary import read_special_tokens

_NUM_CONTEXT = 8
"""Number of preceding tokens that are decoded with a text."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


class Detokenizer:
    """Turns a response's tokens into text.

    Special tokens are left out. A character with missing bytes, for example in a response that was cut, becomes U+FFFD;
    complete characters beside it stay.

    Args:
        tokenizer: The tokenizer.

    >>> from refusion_lit.data.tokenizers import CharacterTokenizer
    >>> detokenize = Detokenizer(CharacterTokenizer(characters="ab").build(None))
    >>> detokenize([3, 4, 1])
    'ab'
    >>> detokenize([3, 1, 4], stop=["<|eos|>"])
    'a<|eos|>b'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast tokenizers
        added = read_added_tokens(tokenizer).by_id
        self._ends = {*read_special_tokens(tokenizer).eos_token_ids}
        self._special = {token: value.content for token, value in added.items() if value.special}
        self._special |= {token: str(tokenizer.convert_ids_to_tokens(token)) for token in self._ends}
        self._bytes: dict[int, int] = {}
        if "ByteFallback" in str(backend.decoder):
            names = ((token, _BYTE.match(name)) for name, token in tokenizer.get_vocab().items())
            self._bytes = {token: int(match[1], 16) for token, match in names if match}

    def __call__(
        self,
        token_ids: Sequence[int],
        after: Sequence[int] = (),
        stop: Sequence[str] = (),
        keep: Sequence[str] = (),
        *,
        is_growing: bool = False,
    ) -> str:
        """Return the text for tokens.

        Args:
            token_ids: The tokens.
            after: The tokens before them, such as the prompt.
            stop: Stop strings. They can match special tokens' names, too: the text has the name of a special token if
                a stop string begins or continues with the name.
            keep: Texts; a special token whose name occurs in them is kept as text.
            is_growing: Whether further tokens may follow. If a name at the end may begin a stop string, the text then
                contains the name, so that a stream can hold it back.
        """
        plain = (token for token in reversed(after) if token not in self._special)
        context = [*islice(plain, _NUM_CONTEXT)][::-1]
        tokens = [*context, *token_ids]
        kept = {token for text in keep for token, name in self._special.items() if name in text}
        before, text = (_join(self._decode(part, kept)) for part in (context, tokens))
        start = len(commonprefix([before, text]))  # noqa: RUF071 - no paths
        names = {token: self._special[token] for token in self._special.keys() & {*token_ids} - kept} if stop else {}
        # A response ends at EOS anyway; only a stop string with the whole name is meant.
        ends = {token for token in self._ends & names.keys() if not any(names[token] in string for string in stop)}
        hidden = names.keys() - ends
        pieces = self._decode(tokens, kept, hidden) if hidden else []
        whole = _join(pieces)
        places = [place for place in (whole.find(string, start) for string in stop) if place >= 0]
        if hidden and is_growing:
            places += [len(whole) - n for string in stop for n in range(1, len(string)) if whole.endswith(string[:n])]
        if not places:
            return text[start:]
        first = min(places)
        shown, place = "", 0
        for piece, names_token in pieces:
            shown += "" if names_token in hidden else piece[: max(first - place, 0)]
            place += len(piece)
        return shown[start:] + whole[first:]

    def _decode(
        self, token_ids: Sequence[int], kept: Set[int], hidden: Set[int] = frozenset()
    ) -> list[tuple[str, int | None]]:
        """Return the text for tokens that begin a text, in pieces.

        Args:
            token_ids: The tokens.
            kept: Special tokens to keep as text.
            hidden: Further special tokens whose names are pieces. Text after them alone begins the text.

        Returns:
            Texts; with each text the special token that it names, or ``None``.
        """
        pieces: list[tuple[str, int | None]] = []
        context: list[int] = []
        for tokens, literal in self._split(token_ids, kept | hidden):
            if literal is not None:
                pieces.append((literal, tokens[0] if tokens[0] in self._special else None))
                context = context or ([] if tokens[0] in hidden else self._anchor)
                continue
            before = self._plain(context) if context else ""
            pieces.append((self._plain([*context, *tokens])[len(before) :], None))
            context = [*context, *tokens][-_NUM_CONTEXT:]
        return pieces

    def _split(self, token_ids: Sequence[int], kept: Set[int]) -> Iterator[tuple[list[int], str | None]]:
        """Yield runs of tokens with their text, which is ``None`` if the tokenizer decodes the run."""
        tokens = [token for token in token_ids if token not in self._special or token in kept]
        pending: list[int] = []
        for (is_special, is_byte), group in groupby(tokens, lambda token: (token in kept, token in self._bytes)):
            run = list(group)
            parts: list[tuple[list[int], str | None]] = [(run, None)]
            if is_special:
                parts = [([token], self._special[token]) for token in run]
            elif is_byte:
                data = bytes(self._bytes[token] for token in run)
                text = data.decode(errors="replace")
                parts = [(run, None if text.encode() == data else text)]  # the tokenizer decodes complete characters
            for part, literal in parts:
                if literal is None:
                    pending += part
                    continue
                if pending:
                    yield pending, None
                pending = []
                yield part, literal
        if pending:
            yield pending, None

    def _plain(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @property
    def _anchor(self) -> list[int]:
        """A letter's tokens, as context for text that does not begin the whole text."""
        try:
            return encode_text(self._tokenizer, "a")
        except ValueError:
            return []


def _join(pieces: Sequence[tuple[str, int | None]]) -> str:
    """Join the pieces' texts."""
    return "".join(text for text, _ in pieces)
