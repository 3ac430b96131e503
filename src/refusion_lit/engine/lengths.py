"""Choice of hole lengths: decodes a prompt with each candidate length and keeps the most probable generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from refusion_lit.engine.output import Generation
from refusion_lit.types import Prompt, SamplingParams

_LEAST = 1e-12
"""Probabilities are clamped to at least this value before the logarithm."""


def choose_lengths(
    run: Callable[[Sequence[Prompt], SamplingParams], Sequence[Generation]],
    groups: Sequence[Sequence[Prompt]],
    sampling: SamplingParams,
    eos_token_ids: Sequence[int],
) -> list[Generation]:
    """Return each group's most probable generation.

    Args:
        run: Decodes prompts and records traces.
        groups: Groups of prompts that differ in the lengths of their holes. The prompt of a group of one is only
            decoded, not scored.
        sampling: Length limit and sampling options.
        eos_token_ids: Ends of sequence.
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
    """Return a prompt that scores a generation: its holes are filled, and each given token right of a hole is masked.

    If a hole has the right length, the model finds the given token again. The tokens that fill the holes count towards
    ``max_new_tokens``: the response is then no longer than that of the prompt, and fits into the context and the cache.

    Args:
        prompt: The prompt.
        row: Its generation, which a stop string may have cut; tokens given after the cut are unchanged.
        eos_token_ids: Ends of sequence; a given one is not masked.
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
    right of holes. The probability of a token is that of its last draft; if another token was drafted, it is what that
    draft left over (1 minus its probability). Given tokens that a stop string cuts off in any of the generations are
    left out for all. Forwards, positions and seconds of the result are totals over all candidates.

    Args:
        prompts: The prompts, which differ in the lengths of their holes.
        rows: Their generations, with traces.
        probes: The prompts with filled holes, from :func:`probe`.
        found: The generations of the probes, with traces.
    """
    hidden = [
        [place for place in _seams(prompt) if probed.given[place] is None]
        for prompt, probed in zip(prompts, probes, strict=True)
    ]
    num_reached = min(map(len, hidden))  # a stop string may end some of them before others
    scores = []
    for prompt, row, seams, again in zip(prompts, rows, hidden, found, strict=True):
        holes = [place for place in range(len(row.token_ids))
                 if place >= len(prompt.given) or prompt.given[place] is None]  # fmt: skip
        drafted = (_mean_log(prompt, row, holes, row), _mean_log(prompt, row, seams[:num_reached], again))
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
    """Return the places of given tokens right of a hole."""
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
