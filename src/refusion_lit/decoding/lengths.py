"""Choosing among generations of one prompt that differ in the lengths of their holes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from refusion_lit.decoding.output import Generation
from refusion_lit.types import Prompt


def most_probable(rows: Sequence[Generation], prompts: Sequence[Prompt]) -> Generation:
    """Return the generation whose generated tokens are most probable on average; ties go to the first one.

    A token's probability is that of the draft that was accepted. Forwards, positions and seconds are those of all
    generations.

    Args:
        rows: Generations with traces.
        prompts: Their prompts.
    """
    pairs = zip(rows, prompts, strict=True)
    best = max(pairs, key=lambda pair: mean_log_probability(*pair))[0]
    return replace(
        best,
        num_forwards=sum(row.num_forwards for row in rows),
        num_positions=sum(row.num_positions for row in rows),
        seconds=sum(row.seconds for row in rows),
        forward_shapes=[shape for row in rows for shape in row.forward_shapes],
    )


def mean_log_probability(row: Generation, prompt: Prompt) -> float:
    """Return the mean log-probability of the generated tokens as they were drafted last; 0 if there are none."""
    drafted: dict[tuple[int, int], float] = {}
    for entry in row.trace:
        drafts = zip(entry.positions, entry.tokens, entry.probabilities, strict=True)
        drafted |= {(position, token): probability for position, token, probability in drafts}
    given = {place for place, token in enumerate(prompt.given) if token is not None}
    start = len(prompt.token_ids)
    found = [drafted.get((start + place, token)) for place, token in enumerate(row.token_ids) if place not in given]
    logs = [math.log(max(probability, 1e-300)) for probability in found if probability is not None]
    return sum(logs) / len(logs) if logs else 0.0
