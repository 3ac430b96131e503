"""A tokenizer's added tokens: tokens with a name that is looked for in text, such as ``<|im_end|>``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import AddedToken, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class AddedTokens:
    """A tokenizer's added tokens, and patterns that find their names in text.

    Attributes:
        by_id: The tokens by their ids.
        by_name: The tokens by their names.
        names: Finds the name of any added token, as a group.
        special_names: Finds the name of a special token.
        other_names: Finds the name of an added token that is not special; white space is no name.
    """

    by_id: Mapping[int, AddedToken]
    by_name: Mapping[str, AddedToken]
    names: re.Pattern[str]
    special_names: re.Pattern[str]
    other_names: re.Pattern[str]


_read: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, AddedTokens]] = WeakKeyDictionary()


def read_added_tokens(tokenizer: PreTrainedTokenizerBase) -> AddedTokens:
    """Return a tokenizer's added tokens.

    Gemma's tokenizers have more than 6 000 added tokens, and reading them takes longer than encoding a text. So they
    are read once, and again after the tokenizer got further tokens or other special tokens.

    Args:
        tokenizer: The tokenizer.

    >>> from refusion_lit.data.tokenizers import CharacterTokenizer
    >>> tokens = read_added_tokens(CharacterTokenizer(characters="ab").build(None))
    >>> tokens.names.split("ab<|eos|>a")
    ['ab', '<|eos|>', 'a']
    """
    state = len(tokenizer), tokenizer.all_special_tokens
    known = _read.get(tokenizer)
    if known is None or known[0] != state:
        by_id = tokenizer.added_tokens_decoder
        added = [*by_id.values()]
        names = _match_any(token.content for token in added)
        tokens = AddedTokens(
            by_id=by_id,
            by_name={token.content: token for token in added},
            names=re.compile(f"({names.pattern})"),
            special_names=_match_any(token.content for token in added if token.special),
            other_names=_match_any(token.content for token in added if not token.special and token.content.strip()),
        )
        known = _read[tokenizer] = state, tokens
    return known[1]


def _match_any(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of the names; long names first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
