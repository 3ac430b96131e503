"""Encodes text as tokens. Text from users and data sets never becomes a special token."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.added_tokens import read_added_tokens
from refusion_lit.data.tokenizers import unknown_text
from refusion_lit.modeling.vocabulary import EOS_IDS, prompt_prefix

_MARKS_BEGINNING = re.compile("prepend_scheme|Prepend|add_prefix_space=True")
"""Matches descriptions of tokenizers that encode a text's beginning differently."""


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False, allow_unknown: bool = False
) -> list[int]:
    """Encode text.

    Args:
        tokenizer: The tokenizer.
        text: The text.
        special: Whether a special token's name becomes the token instead of plain text.
        allow_unknown: Whether unknown characters become the tokenizer's ``unk_token``, with a warning.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet, and ``allow_unknown`` is false or the tokenizer
            names no ``unk_token``.
    """
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast tokenizers
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
        ids = _spell_names(tokenizer, ids)
        wrong |= {untyped.mask_token_id, untyped.eos_token_id, *untyped.init_kwargs.get(EOS_IDS, ())}.intersection(ids)
    if allow_unknown and wrong == {untyped.unk_token_id}:
        message = f"text: a prompt has characters that the tokenizer does not know; {untyped.unk_token} replaces them."
        warnings.warn(message, stacklevel=2)
        return ids
    if wrong:
        raise unknown_text(backend, text, wrong.pop())
    return ids


def _spell_names(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return a text's tokens with special tokens replaced by the tokens that spell their names.

    Text never becomes a special token of BPE. Other models, such as Unigram, find special tokens in their vocabulary.
    """
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    if type(backend.model).__name__ == "BPE":
        return ids
    fillers = (tokenizer.unk_token_id, tokenizer.pad_token_id)
    added = read_added_tokens(tokenizer).by_id
    spelled: list[int] = []
    for token in ids:
        name = added[token].content if token in added and added[token].special and token not in fillers else ""
        parts = (name[:1], name[1:]) if len(name) > 1 else ()
        spelled += [part for text in parts for part in encode_within(tokenizer, text)] or [token]
    return spelled


def encode_within(tokenizer: PreTrainedTokenizerBase, text: str, *, allow_unknown: bool = False) -> list[int]:
    """Encode text that does not begin a text: SentencePiece then puts no space before it.

    Raises:
        ValueError: If a character is unknown; see :func:`encode_text`.
    """
    ids = encode_text(tokenizer, text, allow_unknown=allow_unknown)
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    if not _MARKS_BEGINNING.search(f"{backend.normalizer} {backend.pre_tokenizer}"):
        return ids
    for anchor in ("\n", "a", "0"):
        try:
            before = encode_text(tokenizer, anchor)
            whole = encode_text(tokenizer, anchor + text, allow_unknown=allow_unknown)
        except ValueError:
            continue
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return ids


def encode_plain_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a prompt without template, after BOS by the tokenizer's policy; unknown characters give a warning.

    Raises:
        ValueError: If a character is unknown, and the tokenizer names no ``unk_token``.
    """
    return [*prompt_prefix(tokenizer), *encode_text(tokenizer, text, allow_unknown=True)]


def encode_parts(
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[tuple[str, bool]],
    *,
    within: bool = False,
    allow_unknown: bool = False,
) -> list[int]:
    """Encode consecutive texts; only some may name special tokens.

    Args:
        tokenizer: The tokenizer.
        parts: The texts, with whether names in a text mean special tokens.
        within: Whether the first text does not begin the whole text.
        allow_unknown: Whether unknown characters become the tokenizer's ``unk_token``, with a warning.

    Raises:
        ValueError: If a character is unknown; see :func:`encode_text`.
    """
    pattern = read_added_tokens(tokenizer).names
    if not within and not any(pattern.search(text) for text, is_template in parts if not is_template):
        text = "".join(text for text, _ in parts)
        return encode_text(tokenizer, text, special=True, allow_unknown=allow_unknown)
    pieces: list[tuple[str, bool]] = []  # text, and whether it is a special token
    for text, is_template in parts:
        split = pattern.split(text) if is_template else [text]
        for index, piece in enumerate(split):
            is_name = is_template and index % 2 == 1
            if pieces and not is_name and not pieces[-1][1]:
                pieces[-1] = (pieces[-1][0] + piece, False)
            elif piece:
                pieces.append((piece, is_name))
    ids: list[int] = []
    name = None
    for piece, is_name in _strip_beside_names(tokenizer, pieces):
        if is_name:
            ids.append(int(tokenizer.convert_tokens_to_ids(piece)))  # type: ignore[arg-type]
            name = piece
        else:
            begins = not (ids or within) or (name is not None and _begins_after(tokenizer, name))
            ids += (encode_text if begins else encode_within)(tokenizer, piece, allow_unknown=allow_unknown)
    return ids


def _strip_beside_names(
    tokenizer: PreTrainedTokenizerBase, pieces: Sequence[tuple[str, bool]]
) -> Iterator[tuple[str, bool]]:
    """Yield texts and added tokens' names, without white space that the tokens include, as Phi-3's tokens do."""
    added = read_added_tokens(tokenizer).by_name
    for index, (piece, is_name) in enumerate(pieces):
        before, after = pieces[max(index - 1, 0) : index], pieces[index + 1 : index + 2]
        if not is_name and before and added[before[0][0]].rstrip:
            piece = piece.lstrip()
        if not is_name and after and added[after[0][0]].lstrip:
            piece = piece.rstrip()
        if piece:
            yield piece, is_name


def _begins_after(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Return whether text after a special token is encoded as a text's beginning, as old SentencePiece files do."""
    for letter in ("a", "0"):
        try:
            return encode_text(tokenizer, name + letter, special=True)[1:] == encode_text(tokenizer, letter)
        except ValueError:  # the tokenizer does not know the letter
            continue
    return False


def split_added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[str, bool]]:
    """Split a text at added tokens' names; return the parts, and whether a part is such a name, special or not."""
    return [(part, index % 2 == 1) for index, part in enumerate(read_added_tokens(tokenizer).names.split(text)) if part]
