"""Response templates: text with spans, whose lengths in tokens are known or bounded.

``{"name": "{{1-6}}", "age": {{2}}}`` has a span of 1 to 6 tokens and a span of 2 tokens. With ``{{...}}`` at the end,
the response may continue after the template.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_within
from refusion_lit.decoding import DecodingOutput, Generation, GenerationCallback
from refusion_lit.modeling.vocabulary import read_special_tokens
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.require import require

MAX_LENGTHS = 64
"""Maximum number of span length combinations that are tried for a prompt."""
MAX_SPAN = 1_000_000
"""Maximum span length in tokens."""

_NUM_TOGETHER = 64
"""Number of prompts whose span lengths are tried together; callbacks run after every group."""
_MIN_PROBABILITY = 1e-12
"""Probabilities are clamped to at least this value before the logarithm."""

_GAP = re.compile(r"\{\{\s*(?:(\d+)(?:\s*-\s*(\d+))?|(\.\.\.))\s*\}\}")


@dataclass(frozen=True, kw_only=True)
class Template:
    """A response template: given text with spans to fill.

    Attributes:
        parts: The parts in order: given text, or a span as its minimum and maximum length in tokens.
        is_open: Whether the response may continue after the last part.

    >>> Template.parse("age: {{1-2}} years")
    Template(parts=('age: ', (1, 2), ' years'), is_open=False)
    """

    parts: tuple[str | tuple[int, int], ...]
    is_open: bool = False

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template; double braces with anything but numbers or dots in them are text.

        Raises:
            ValueError: If the template is empty, a span is impossible, or there are too many length combinations.
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
            expected = f"spans of 1 to {MAX_SPAN} tokens, the smaller number first"
            require(1 <= span[0] <= span[1] <= MAX_SPAN, "template", expected, mark[0], "write {{3}} or {{1-6}}, say")
            parts.append(span)
        parts += [text[end:]] if text[end:] else []
        require(bool(parts), "template", "some text or a span", text[:80], "write the text that is given")
        num = math.prod(span[1] - span[0] + 1 for span in parts if not isinstance(span, str))
        fix = "narrow the spans"
        require(num <= MAX_LENGTHS, "template", f"at most {MAX_LENGTHS} combinations of span lengths", num, fix)
        return cls(parts=tuple(parts), is_open=is_open)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int | None, ...]]:
        """Return the response's tokens, ``None`` in spans, for every span length combination.

        A token never crosses the edge of a span.

        Raises:
            ValueError: If a character is not in the tokenizer's alphabet.
        """
        ends: list[int | None] = [] if self.is_open else [int(tokenizer.eos_token_id)]  # type: ignore[arg-type]
        choices: list[list[list[int | None]]] = [
            [[*encode_within(tokenizer, part)]]
            if isinstance(part, str)
            else [[None] * length for length in range(part[0], part[1] + 1)]
            for part in self.parts
        ]
        return [tuple(token for tokens in chosen for token in tokens) + tuple(ends) for chosen in product(*choices)]


def candidates(prompt: Prompt, template: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return a prompt with a template's given tokens, for every span length combination.

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
    """Decode prompts within templates; choose the most probable span lengths.

    Args:
        decode: Decodes prompts.
        prompts: The prompts.
        templates: A template per prompt; ``None`` to give nothing.
        sampling: Length limit and sampling options.
        tokenizer: Encodes the given text.
        callbacks: If a span has several possible lengths, callbacks get finished responses only.
        trace: Trace every forward pass.
        options: Further options for ``decode``.

    Raises:
        ValueError: If a template is wrong, and as ``decode``.
    """
    is_complete = isinstance(templates, list | tuple) and len(templates) == len(prompts)
    expected = f"a list of {len(prompts)}, a template per prompt"
    require(is_complete, "templates", expected, templates, "give None for prompts without a template")
    groups = [candidates(prompt, text, tokenizer) for prompt, text in zip(prompts, templates, strict=True)]
    if all(len(group) == 1 for group in groups):
        single = [prompt for [prompt] in groups]
        return decode(single, sampling=sampling, callbacks=callbacks, trace=trace, **options).rows

    def run(candidates: Sequence[Prompt], sampling: SamplingParams) -> list[Generation]:
        return decode(candidates, sampling=sampling, trace=True, **options).rows

    rows: list[Generation] = []
    for start in range(0, len(groups), _NUM_TOGETHER):
        part = groups[start : start + _NUM_TOGETHER]
        for row in choose_lengths(run, part, sampling, read_special_tokens(tokenizer).eos_token_ids):
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
    """Return every group's most probable generation.

    Args:
        run: Decodes prompts and records traces.
        groups: Prompts that differ in their span lengths, by group. A single prompt is decoded without scoring.
        sampling: Length limit and sampling options.
        eos_token_ids: EOS tokens.
    """
    generations = iter(run([prompt for group in groups for prompt in group], sampling))
    rows = [[next(generations) for _ in group] for group in groups]
    probes = [
        [make_probe(*pair, eos_token_ids) for pair in zip(group, group_rows, strict=True)] if len(group) > 1 else []
        for group, group_rows in zip(groups, rows, strict=True)
    ]
    # Without early stopping, which could cut tokens whose probabilities are needed.
    unending = replace(sampling, stop=())
    scores = iter(run([probe for group_probes in probes for probe in group_probes], unending))
    return [
        choose_most_probable(group, group_rows, group_probes, [next(scores) for _ in group_probes])
        if group_probes
        else group_rows[0]
        for group, group_rows, group_probes in zip(groups, rows, probes, strict=True)
    ]


def make_probe(prompt: Prompt, row: Generation, eos_token_ids: Sequence[int]) -> Prompt:
    """Return a prompt that scores a generation: spans are filled, and the given tokens right of spans are masked.

    If a span has the right length, the model predicts the given token after it. Tokens in filled spans count towards
    ``max_new_tokens``. The probe's response is therefore no longer than the prompt's, and fits into context and cache.

    Args:
        prompt: The prompt.
        row: The prompt's generation, which a stop string may have cut; given tokens after the cut are unchanged.
        eos_token_ids: EOS tokens, which are not masked.
    """
    length = prompt.given_length
    filled: list[int | None] = [*row.token_ids[:length], *prompt.given[len(row.token_ids) : length]]
    for place in _seams(prompt):
        if place < len(row.token_ids) and filled[place] not in eos_token_ids:
            filled[place] = None
    probe = replace(prompt, given=tuple(filled))
    return replace(probe, num_filled=probe.num_given - prompt.num_given)


def choose_most_probable(
    prompts: Sequence[Prompt], rows: Sequence[Generation], probes: Sequence[Prompt], probe_rows: Sequence[Generation]
) -> Generation:
    """Return the generation with the most probable filling; on ties, the first generation.

    The score adds two mean log-probabilities: over the generated tokens, and over the given tokens right of spans. A
    token's probability comes from the last draft at its place: the draft's probability p if the draft is the token, and
    1 - p otherwise. Given tokens that a stop string cuts off in any generation are left out for all. The result counts
    forward passes, positions and seconds over all candidates.

    Args:
        prompts: The prompts, which differ in their span lengths.
        rows: The prompts' generations, with traces.
        probes: The prompts with filled spans, from :func:`make_probe`.
        probe_rows: The probes' generations, with traces.
    """
    masked_seams = [
        [place for place in _seams(prompt) if probe.given[place] is None]
        for prompt, probe in zip(prompts, probes, strict=True)
    ]
    num_reached = min(map(len, masked_seams))  # a stop string may end some responses before others
    scores = []
    for prompt, row, seams, probe_row in zip(prompts, rows, masked_seams, probe_rows, strict=True):
        generated = [place for place in range(len(row.token_ids))
                     if place >= len(prompt.given) or prompt.given[place] is None]  # fmt: skip
        filling_score = _mean_log(prompt, row, generated, row)
        fit_score = _mean_log(prompt, row, seams[:num_reached], probe_row)  # how well the text right of spans follows
        scores.append(filling_score + fit_score)
    candidates = [*rows, *probe_rows]
    return replace(
        rows[scores.index(max(scores))],
        num_forwards=sum(row.num_forwards for row in candidates),
        num_positions=sum(row.num_positions for row in candidates),
        seconds=sum(row.seconds for row in candidates),
        forward_shapes=[shape for row in candidates for shape in row.forward_shapes],
    )


def _seams(prompt: Prompt) -> list[int]:
    """Return the places where a given token stands right after a span."""
    given = prompt.given
    return [place for place in range(1, prompt.given_length) if given[place] is not None and given[place - 1] is None]


def _mean_log(prompt: Prompt, row: Generation, places: Sequence[int], drafted: Generation) -> float:
    """Return the mean log-probability for a generation's tokens at ``places``, by the last drafts in ``drafted``."""
    last: dict[int, tuple[int, float]] = {}
    for entry in drafted.trace:
        drafts = zip(entry.positions, entry.tokens, entry.probabilities, strict=True)
        last |= {position: (token, probability) for position, token, probability in drafts}
    logs = []
    for place in places:
        token, probability = last.get(len(prompt.token_ids) + place, (row.token_ids[place], 1.0))
        likelihood = probability if token == row.token_ids[place] else 1 - probability
        logs.append(math.log(max(likelihood, _MIN_PROBABILITY)))
    return sum(logs) / len(logs) if logs else 0.0
