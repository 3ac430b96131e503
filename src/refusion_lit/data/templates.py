"""Templates of responses: text with gaps of a known or bounded number of tokens.

``{"name": "{{1-6}}", "age": {{2}}}`` has a gap of one to six tokens and one of two. ``{{...}}`` at the end leaves the
response open; without it, the response ends where the template does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_text
from refusion_lit.decoding import DecodingOutput, Generation, GenerationCallback
from refusion_lit.engine.lengths import choose_lengths
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.files import read_text
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


def read_template(path: str) -> str:
    """Return the text of a template file, without the line break at its end.

    Raises:
        ValueError: If the file is missing or not UTF-8.
    """
    return read_text(path, "template").removesuffix("\n")


def candidates(prompt: Prompt, template: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return a prompt with what a template gives, for each combination of gap lengths.

    Raises:
        ValueError: If the template is wrong.
    """
    if template is None:
        return [prompt]
    require(isinstance(template, str), "template", "a text with gaps such as {{3}}", template, "write one text")
    return [replace(prompt, given=given) for given in Template.parse(template).encode(tokenizer)]


def fill_templates(
    decode: Callable[..., DecodingOutput],
    prompts: Sequence[Prompt],
    templates: Sequence[str | None],
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    callbacks: Sequence[GenerationCallback] = (),
    trace: bool = False,
    **options: Any,  # noqa: ANN401 - options of decode
) -> list[Generation]:
    """Decode prompts within templates; of several gap lengths, return the most probable filling.

    Args:
        decode: Decodes prompts.
        prompts: The prompts.
        templates: One for each prompt; ``None`` to give nothing.
        sampling: Length limit and sampling options.
        tokenizer: Encodes the given text.
        callbacks: Notified of finished responses only if a gap has several possible lengths.
        trace: Record a trace of every forward.
        options: Further options of ``decode``.

    Raises:
        ValueError: If a template is wrong, and as ``decode``.
    """
    holds = not isinstance(templates, str) and len(templates) == len(prompts)
    fix = "give None for those without"
    require(holds, "templates", f"a list of one for each of {len(prompts)} prompts", templates, fix)
    groups = [candidates(prompt, text, tokenizer) for prompt, text in zip(prompts, templates, strict=True)]
    if all(len(group) == 1 for group in groups):
        single = [prompt for [prompt] in groups]
        return decode(single, sampling=sampling, callbacks=callbacks, trace=trace, **options).rows

    def run(tried: Sequence[Prompt], how: SamplingParams) -> list[Generation]:
        return decode(tried, sampling=how, trace=True, **options).rows

    rows = choose_lengths(run, groups, sampling, SpecialTokens.of(tokenizer).eos_token_ids)
    for number, row in enumerate(rows):
        row.trace = row.trace if trace else []
        for callback in callbacks:
            callback.on_finished(number, row)
    return rows
