"""Templates of responses: text with spans of a known or bounded number of tokens.

``{"name": "{{1-6}}", "age": {{2}}}`` has a span of one to six tokens and one of two. ``{{...}}`` at the end leaves the
response open; without it, the response ends where the template does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_text
from refusion_lit.decoding import DecodingOutput, Generation, GenerationCallback
from refusion_lit.modeling.vocabulary import special_tokens_of
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.require import require

MAX_LENGTHS = 64
"""Maximum number of combinations of span lengths tried for one prompt."""
MAX_SPAN = 1_000_000
"""Maximum number of tokens in a span."""

_NUM_TOGETHER = 64
"""Prompts with spans of several lengths that are decoded before the first one's response is told."""
_LEAST = 1e-12
"""Probabilities are clamped to at least this value before the logarithm."""

_GAP = re.compile(r"\{\{\s*(?:(\d+)(?:\s*-\s*(\d+))?|(\.\.\.))\s*\}\}")


@dataclass(frozen=True, kw_only=True)
class Template:
    """A response template: given text with spans to fill.

    Attributes:
        parts: The parts in order: given text, or a span as its minimum and maximum number of tokens.
        is_open: Whether the response may continue after the last part.
    """

    parts: tuple[str | tuple[int, int], ...]
    is_open: bool = False

    @classmethod
    def parse(cls, text: str) -> Template:
        """Read a template; double braces with anything but numbers or dots in them are text.

        Raises:
            ValueError: If it is empty, a span is impossible, or there are too many combinations of lengths.
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
            span = int(mark[1]), int(mark[2] or mark[1])
            expected = f"spans of 1 to {MAX_SPAN} tokens, the lesser number first"
            require(1 <= span[0] <= span[1] <= MAX_SPAN, "template", expected, mark[0], "write {{3}} or {{1-6}}, say")
            parts.append(span)
        parts += [text[end:]] if text[end:] else []
        require(bool(parts), "template", "some text or a span", text[:80], "write the text that is given")
        num = math.prod(span[1] - span[0] + 1 for span in parts if not isinstance(span, str))
        fix = "narrow the spans"
        require(num <= MAX_LENGTHS, "template", f"at most {MAX_LENGTHS} combinations of span lengths", num, fix)
        return cls(parts=tuple(parts), is_open=is_open)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int | None, ...]]:
        """Return the tokens of the response, ``None`` in spans, for each combination of span lengths.

        Each text is encoded on its own: a word that reaches over the edge of a span is not one token.

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


def candidates(prompt: Prompt, template: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return a prompt with what a template gives, for each combination of span lengths.

    Raises:
        ValueError: If the template is wrong.
    """
    if template is None:
        return [prompt]
    require(isinstance(template, str), "template", "a text with spans such as {{3}}", template, "write one text")
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
    """Decode prompts within templates; of several span lengths, return the most probable filling.

    Args:
        decode: Decodes prompts.
        prompts: The prompts.
        templates: One for each prompt; ``None`` to give nothing.
        sampling: Length limit and sampling options.
        tokenizer: Encodes the given text.
        callbacks: Notified of finished responses only if a span has several possible lengths.
        trace: Record a trace of every forward.
        options: Further options of ``decode``.

    Raises:
        ValueError: If a template is wrong, and as ``decode``.
    """
    holds = isinstance(templates, list | tuple) and len(templates) == len(prompts)
    expected = f"a list of one for each of {len(prompts)} prompts"
    require(holds, "templates", expected, templates, "give None for those without")
    groups = [candidates(prompt, text, tokenizer) for prompt, text in zip(prompts, templates, strict=True)]
    if all(len(group) == 1 for group in groups):
        single = [prompt for [prompt] in groups]
        return decode(single, sampling=sampling, callbacks=callbacks, trace=trace, **options).rows

    def run(tried: Sequence[Prompt], how: SamplingParams) -> list[Generation]:
        return decode(tried, sampling=how, trace=True, **options).rows

    rows: list[Generation] = []
    for start in range(0, len(groups), _NUM_TOGETHER):  # a response is told once all lengths of its slice are decoded
        part = groups[start : start + _NUM_TOGETHER]
        for row in choose_lengths(run, part, sampling, special_tokens_of(tokenizer).eos_token_ids):
            row.trace = row.trace if trace else []
            for callback in callbacks:
                callback.on_finished(len(rows), row)
            rows.append(row)
    return rows


def choose_lengths(
    run: Callable[[Sequence[Prompt], SamplingParams], Sequence[Generation]],
    groups: Sequence[Sequence[Prompt]],
    sampling: SamplingParams,
    eos_token_ids: Sequence[int],
) -> list[Generation]:
    """Return each group's most probable generation.

    Args:
        run: Decodes prompts and records traces.
        groups: Groups of prompts that differ in the lengths of their spans. The prompt of a group of one is only
            decoded, not scored.
        sampling: Length limit and sampling options.
        eos_token_ids: EOS tokens.
    """
    every = iter(run([prompt for group in groups for prompt in group], sampling))
    rows = [[next(every) for _ in group] for group in groups]
    probes = [
        [probe(*pair, eos_token_ids) for pair in zip(group, own, strict=True)] if len(group) > 1 else []
        for group, own in zip(groups, rows, strict=True)
    ]
    # No early stopping here: it could cut tokens whose probabilities are needed.
    unending = replace(sampling, stop=(), min_entropy=None)
    found = iter(run([probed for again in probes for probed in again], unending))
    tried = [(*parts, [next(found) for _ in parts[2]]) for parts in zip(groups, rows, probes, strict=True)]
    return [most_probable(*parts) if parts[2] else parts[1][0] for parts in tried]


def probe(prompt: Prompt, row: Generation, eos_token_ids: Sequence[int]) -> Prompt:
    """Return a prompt that scores a generation: its spans are filled, and each given token right of a span is masked.

    If a span has the right length, the model finds the given token again. The tokens that fill the spans count towards
    ``max_new_tokens``: the response is then no longer than that of the prompt, and fits into the context and the cache.

    Args:
        prompt: The prompt.
        row: Its generation, which a stop string may have cut; tokens given after the cut are unchanged.
        eos_token_ids: EOS tokens; a given one is not masked.
    """
    length = prompt.given_length
    filled: list[int | None] = [*row.token_ids[:length], *prompt.given[len(row.token_ids) : length]]
    for place in _seams(prompt):
        if place < len(row.token_ids) and filled[place] not in eos_token_ids:
            filled[place] = None
    probed = replace(prompt, given=tuple(filled))
    return replace(probed, num_filled=probed.num_given - prompt.num_given)


def most_probable(
    prompts: Sequence[Prompt], rows: Sequence[Generation], probes: Sequence[Prompt], found: Sequence[Generation]
) -> Generation:
    """Return the generation with the most probable filling; ties go to the first one.

    The score is the mean log-probability of the generated tokens, plus the mean log-probability of the given tokens
    right of spans. The probability of a token is that of its last draft; if another token was drafted, it is what that
    draft left over (1 minus its probability). Given tokens that a stop string cuts off in any of the generations are
    left out for all. Forwards, positions and seconds of the result are totals over all candidates.

    Args:
        prompts: The prompts, which differ in the lengths of their spans.
        rows: Their generations, with traces.
        probes: The prompts with filled spans, from :func:`probe`.
        found: The generations of the probes, with traces.
    """
    hidden = [
        [place for place in _seams(prompt) if probed.given[place] is None]
        for prompt, probed in zip(prompts, probes, strict=True)
    ]
    num_reached = min(map(len, hidden))  # a stop string may end some of them before others
    scores = []
    for prompt, row, seams, again in zip(prompts, rows, hidden, found, strict=True):
        spans = [place for place in range(len(row.token_ids))
                 if place >= len(prompt.given) or prompt.given[place] is None]  # fmt: skip
        drafted = (_mean_log(prompt, row, spans, row), _mean_log(prompt, row, seams[:num_reached], again))
        scores.append(sum(drafted))
    every = [*rows, *found]
    return replace(
        rows[scores.index(max(scores))],
        num_forwards=sum(row.num_forwards for row in every),
        num_positions=sum(row.num_positions for row in every),
        seconds=sum(row.seconds for row in every),
        forward_shapes=[shape for row in every for shape in row.forward_shapes],
    )


def _seams(prompt: Prompt) -> list[int]:
    """Return the places of given tokens right of a span."""
    given = prompt.given
    return [place for place in range(1, prompt.given_length) if given[place] is not None and given[place - 1] is None]


def _mean_log(prompt: Prompt, row: Generation, places: Sequence[int], drafted: Generation) -> float:
    """Return the mean log-probability of a generation's tokens at ``places`` under the last drafts of ``drafted``."""
    last: dict[int, tuple[int, float]] = {}
    for entry in drafted.trace:
        drafts = zip(entry.positions, entry.tokens, entry.probabilities, strict=True)
        last |= {position: (token, probability) for position, token, probability in drafts}
    logs = []
    for place in places:
        token, probability = last.get(len(prompt.token_ids) + place, (row.token_ids[place], 1.0))
        own = probability if token == row.token_ids[place] else 1 - probability
        logs.append(math.log(max(own, _LEAST)))
    return sum(logs) / len(logs) if logs else 0.0
