"""Prompts of token ids, and templates of responses: text with gaps of a known or bounded number of tokens.

``{"name": "{{1-6}}", "age": {{2}}}`` has a gap of one to six tokens and one of two. ``{{...}}`` at the end leaves the
response open; without it, the response ends where the template does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from operator import index

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_text
from refusion_lit.types import Prompt
from refusion_lit.utils.require import require

MAX_LENGTHS = 64
"""Maximum number of combinations of gap lengths tried for one prompt."""
MAX_GAP = 1_000_000
"""Maximum number of tokens in a gap."""

_GAP = re.compile(r"\{\{\s*(?:(\d+)(?:\s*-\s*(\d+))?|(\.\.\.))\s*\}\}")


@dataclass(frozen=True, kw_only=True)
class Template:
    """A response template: given text with gaps to fill.

    Attributes:
        parts: The parts in order: given text, or a gap as its minimum and maximum number of tokens.
        is_open: Whether the response may continue after the last part.
    """

    parts: tuple[str | tuple[int, int], ...]
    is_open: bool = False

    @classmethod
    def parse(cls, text: str) -> Template:
        """Read a template; double braces with anything but numbers or dots in them are text.

        Raises:
            ValueError: If it is empty, a gap is impossible, or there are too many combinations of lengths.
        """
        parts: list[str | tuple[int, int]] = []
        end = 0
        is_open = False
        for mark in _GAP.finditer(text):
            if text[end : mark.start()]:
                parts.append(text[end : mark.start()])
            end = mark.end()
            if mark[3]:
                is_open = True
                require(end == len(text), "template", "{{...}} at its end only", text[:80], "move or remove it")
                continue
            gap = int(mark[1]), int(mark[2] or mark[1])
            expected = f"gaps of 1 to {MAX_GAP} tokens, the lesser number first"
            require(1 <= gap[0] <= gap[1] <= MAX_GAP, "template", expected, mark[0], "write {{3}} or {{1-6}}, say")
            parts.append(gap)
        parts += [text[end:]] if text[end:] else []
        require(bool(parts), "template", "some text or a gap", text[:80], "write the text that is given")
        num = prod(gap[1] - gap[0] + 1 for gap in parts if not isinstance(gap, str))
        fix = "narrow the gaps"
        require(num <= MAX_LENGTHS, "template", f"at most {MAX_LENGTHS} combinations of gap lengths", num, fix)
        return cls(parts=tuple(parts), is_open=is_open)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int | None, ...]]:
        """Return the tokens of the response, ``None`` in gaps, for each combination of gap lengths.

        Each text is encoded on its own: a word that reaches over the edge of a gap is not one token.

        Raises:
            ValueError: If a character is not in the tokenizer's alphabet.
        """
        ends: list[int | None] = [] if self.is_open else [int(tokenizer.eos_token_id)]  # type: ignore[arg-type]
        choices: list[list[list[int | None]]] = [
            [[*encode_text(tokenizer, part)]]
            if isinstance(part, str)
            else [[None] * length for length in range(part[0], part[1] + 1)]
            for part in self.parts
        ]
        return [tuple(token for tokens in chosen for token in tokens) + tuple(ends) for chosen in product(*choices)]


def prompt_of(tokens: Sequence[int], name: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return a prompt of token ids.

    Args:
        tokens: The ids.
        name: Id of the prompt.
        tokenizer: Must know all of them.

    Raises:
        ValueError: Naming the prompt and what the tokenizer does not know.
    """
    option = f"prompt {name}"
    size = len(tokenizer)
    try:
        token_ids = tuple(index(token) for token in tokens)
    except TypeError as error:
        raise ValueError(
            f"{option}: expected a list of token ids, got {tokens!r:.60}; use generate for texts."
        ) from error
    for token in token_ids:
        # A vocabulary with gaps has ids beyond its size.
        known = 0 <= token < size or (token >= size and tokenizer.convert_ids_to_tokens(token) is not None)
        require(known, option, f"token ids below {size}, the tokenizer's size", token, "encode with its tokenizer")
    return Prompt(token_ids=token_ids, id=name)


def candidates(prompt: Prompt, template: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return a prompt with what a template gives, for each combination of gap lengths.

    Raises:
        ValueError: If the template is wrong.
    """
    if template is None:
        return [prompt]
    require(isinstance(template, str), "template", "a text with gaps such as {{3}}", template, "write one text")
    return [replace(prompt, given=given) for given in Template.parse(template).encode(tokenizer)]
