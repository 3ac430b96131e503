"""From examples to token ids: templates around, text inside, special tokens never from the text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from refusion_lit.types import Example

_SENTINEL = "\N{PRIVATE USE ONE}CONTENT {}\N{PRIVATE USE ONE}"
_SPLIT = re.compile("\N{PRIVATE USE ONE}CONTENT (\\d+)\N{PRIVATE USE ONE}")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode text that a user or a data set wrote: the name of a special token in it stays plain text.

    Raises:
        ValueError: If the tokenizer's alphabet lacks one of the characters.
    """
    backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast ones
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    finally:
        backend.encode_special_tokens = before
    unknown = tokenizer.pad_token_id
    if unknown in ids and type(backend.model).__name__ == "WordLevel":
        missing = sorted(set(text) - set(backend.get_vocab()))
        raise ValueError(
            f"text: the tokenizer has no token for {', '.join(map(repr, missing))} (in {text[:60]!r}). "
            "Add it to tokenizer.characters, or use TrainedBPE."
        )
    return ids


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    query: str,
    prompt_template: str = "{query}",
    messages: Sequence[Mapping[str, str]] = (),
) -> list[int]:
    """Encode a query as the prompt of a response.

    With a chat template in the tokenizer, the query is one user turn (or ``messages`` are the turns) and the
    assistant's turn is opened. Otherwise ``prompt_template`` is filled in.

    Raises:
        ValueError: If nothing is left to encode.
    """
    if tokenizer.chat_template:
        turns = list(messages) or [{"role": "user", "content": query}]
        ids = _encode_chat(tokenizer, turns)
    else:
        before, _, after = prompt_template.partition("{query}")
        parts = (_encode_template(tokenizer, before), encode_text(tokenizer, query), _encode_template(tokenizer, after))
        ids = [token for part in parts for token in part]
    if not ids:
        raise ValueError("prompt: expected some text, got an empty prompt; give it some text.")
    return ids


def encode_example(
    tokenizer: PreTrainedTokenizerBase, example: Example, prompt_template: str = "{query}"
) -> tuple[list[int], list[int]]:
    """Encode an example as prompt and response, the response with its end of sequence.

    Raises:
        ValueError: If the response is empty or a character is unknown.
    """
    if not example.response:
        raise ValueError(f"example {example.id}: expected a response, got an empty one; remove it or skip malformed ones.")
    prompt = encode_prompt(tokenizer, example.query, prompt_template, example.messages)
    return prompt, [*encode_text(tokenizer, example.response), int(tokenizer.eos_token_id)]  # type: ignore[arg-type]


def _encode_template(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode the template's own text, in which special tokens are meant."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids if text else []  # type: ignore[attr-defined]


def _encode_chat(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> list[int]:
    """Render the chat template around placeholders, so that contents can be encoded as plain text."""
    marked = [{**turn, "content": _SENTINEL.format(i)} for i, turn in enumerate(turns)]
    rendered = str(tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True))
    ids: list[int] = []
    for i, part in enumerate(_SPLIT.split(rendered)):
        ids += encode_text(tokenizer, turns[int(part)]["content"]) if i % 2 else _encode_template(tokenizer, part)
    return ids
