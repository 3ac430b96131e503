"""Text of responses, decoded as a part of the whole text: prompt + response text = text of all tokens.

Some tokenizers decode a token differently at the beginning of a text: SentencePiece drops the space before the first
word. A response is therefore decoded together with the last tokens of its prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_text

_NUM_CONTEXT = 8
"""Number of tokens before a text that are decoded with it."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


class Detokenizer:
    """Turns the tokens of a response into text.

    Special tokens are left out. A character of which bytes are missing, for example because a response was cut, becomes
    U+FFFD; complete characters beside it stay.

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
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast ones
        added = tokenizer.added_tokens_decoder
        self._special = {token: value.content for token, value in added.items() if value.special}
        self._bytes: dict[int, int] = {}
        if "ByteFallback" in str(backend.decoder):
            names = ((token, _BYTE.match(name)) for name, token in tokenizer.get_vocab().items())
            self._bytes = {token: int(match[1], 16) for token, match in names if match}

    def __call__(self, token_ids: Sequence[int], after: Sequence[int] = (), stop: Sequence[str] = ()) -> str:
        """Return the text of tokens.

        Args:
            token_ids: The tokens.
            after: The tokens before them, such as the prompt.
            stop: Stop strings. Special tokens whose names they contain are kept as text, so that they can be found.
        """
        plain = (token for token in reversed(after) if token not in self._special)
        context = [*islice(plain, _NUM_CONTEXT)][::-1]
        before = self._decode(context)
        text = self._decode([*context, *token_ids], stop)
        return text[len(commonprefix([before, text])) :]  # noqa: RUF071 - no paths

    def _decode(self, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Return the text of tokens from the beginning of a text."""
        text = ""
        context: list[int] = []
        for tokens, literal in self._split(token_ids, stop):
            if literal is not None:
                text += literal
                context = context or self._anchor
                continue
            before = self._plain(context) if context else ""
            text += self._plain([*context, *tokens])[len(before) :]
            context = [*context, *tokens][-_NUM_CONTEXT:]
        return text

    def _split(self, token_ids: Sequence[int], stop: Sequence[str]) -> Iterator[tuple[list[int], str | None]]:
        """Yield runs of tokens for the tokenizer (with ``None``), and runs with their text."""
        names = {token: name for token, name in self._special.items() if any(name in string for string in stop)}
        tokens = [token for token in token_ids if token not in self._special or token in names]
        pending: list[int] = []
        for kind, group in groupby(tokens, lambda token: "name" if token in names else token in self._bytes):
            run = list(group)
            literal = None
            if kind == "name":
                literal = "".join(names[token] for token in run)
            elif kind:
                data = bytes(self._bytes[token] for token in run)
                literal = data.decode(errors="replace")
                literal = None if literal.encode() == data else literal  # the tokenizer decodes complete characters
            if literal is None:
                pending += run
                continue
            if pending:
                yield pending, None
            pending = []
            yield run, literal
        if pending:
            yield pending, None

    def _plain(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @property
    def _anchor(self) -> list[int]:
        """Tokens of a letter, as context of text that does not begin the whole text."""
        try:
            return encode_text(self._tokenizer, "a")
        except ValueError:
            return []
