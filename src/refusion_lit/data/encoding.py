"""Encoding of prompts and responses.

Text of users and data sets never becomes a special token.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.tokenizers import unknown_text
from refusion_lit.modeling.vocabulary import EOS_IDS, get_add_bos, prompt_prefix, starts_with_bos
from refusion_lit.utils.require import require


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    query: str,
    prompt_template: str = "{query}",
    messages: Sequence[Mapping[str, str]] = (),
) -> list[int]:
    """Encode a query as a prompt.

    With a chat template, the query is a user turn (or ``messages`` are the turns), followed by the opening of the
    assistant's turn. Without a chat template, ``prompt_template`` is filled in. The name of a special token becomes the
    token if the template contains it, and plain text if the query does. A query without names of special tokens is
    encoded together with the template around it.

    The prompt begins with the BOS token if the tokenizer's policy says so
    (:func:`~refusion_lit.modeling.vocabulary.set_add_bos`) and the template does not write it. With ``add_bos: auto``,
    nothing is added to a chat template's tokens, as in transformers' ``apply_chat_template``.

    Args:
        tokenizer: The tokenizer.
        query: The query.
        prompt_template: Text with ``{query}`` in it.
        messages: Chat turns, instead of the query.

    Raises:
        ValueError: If a character is unknown, the chat template refuses the turns, or the prompt is empty.
    """
    turns = list(messages) or [{"role": "user", "content": query}]
    roles = ", ".join(turn["role"] for turn in turns)
    guard = _Guard(tokenizer, (text for turn in turns for text in (query, *turn.values())))
    if tokenizer.chat_template:
        marked = [{name: guard.mark(text) for name, text in turn.items()} for turn in turns]
        try:
            rendered = str(tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template may raise any error
            message = f"messages: the chat template refuses turns of {roles} ({error}); reorder them."
            raise ValueError(message) from error
    else:
        expected = "one turn, as the tokenizer has no chat template"
        require(len(turns) == 1, "messages", expected, f"turns of {roles}", "leave out the other turns")
        rendered = prompt_template.replace("{query}", guard.mark(query))
    ids = [token for text, special in guard.split(rendered) for token in encode_text(tokenizer, text, special=special)]
    if not ids:
        raise ValueError("prompt: expected some text, got an empty prompt; give it some text.")
    is_complete = bool(tokenizer.chat_template) and get_add_bos(tokenizer) == "auto"
    return ids if is_complete or starts_with_bos(ids, tokenizer) else [*prompt_prefix(tokenizer), *ids]


def encode_plain_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a prompt without template, as :func:`encode_text` does, after BOS by the tokenizer's policy.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet.
    """
    return [*prompt_prefix(tokenizer), *encode_text(tokenizer, text)]


class _Guard:
    """Marks names of special tokens in users' text, so that they differ from a template's names after rendering.

    Only names are marked, so that a template can trim and inspect the rest of the text.

    Args:
        tokenizer: The tokenizer with the special tokens.
        texts: All texts to mark; the marks are characters that occur in none of the texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
        added = tokenizer.added_tokens_decoder.values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        used = set().union(*texts)
        # Unicode reserves code points from U+FDD0 on for internal use; texts rarely contain them.
        free = (mark for mark in map(chr, range(0xFDD0, sys.maxunicode)) if mark not in used)
        self._open = next(free)
        self._close = next(free)

    def mark(self, text: str) -> str:
        """Mark the names of special tokens in a text."""
        return self._names.sub(lambda name: f"{self._open}{name[0]}{self._close}", text)

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Split at the marks; return pairs of a text and whether names in the text mean special tokens."""
        parts = re.split(f"{self._open}([^{self._open}{self._close}]*){self._close}", rendered)
        # A template that truncates a name leaves an unpaired mark.
        unpaired = str.maketrans("", "", self._open + self._close)
        return [(part.translate(unpaired), i % 2 == 0) for i, part in enumerate(parts) if part]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """Encode text; with ``special``, names of special tokens become these tokens instead of plain text.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet.
    """
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast ones
    before = backend.encode_special_tokens
    backend.encode_special_tokens = not special
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    except TypeError as error:
        message = f"text: expected Unicode, got a lone surrogate (in {text[:60]!r}); remove the \\udXXX from it."
        raise ValueError(message) from error
    finally:
        backend.encode_special_tokens = before
    untyped: Any = tokenizer  # transformers types ids as integers or lists
    # Tokens that stand for unknown text. A template may name them; then they are meant.
    fillers = {untyped.pad_token_id: untyped.pad_token, untyped.unk_token_id: untyped.unk_token}
    wrong = {token for token, name in fillers.items() if ids.count(token) > (text.count(str(name)) if special else 0)}
    if not special:
        wrong |= {untyped.mask_token_id, untyped.eos_token_id, *untyped.init_kwargs.get(EOS_IDS, ())}.intersection(ids)
    if wrong:
        raise unknown_text(backend, text, wrong.pop())
    return ids
