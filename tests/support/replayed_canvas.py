"""UniformDiffusion that repeats the random draws of another program, to compare the two step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from refusion_lit.decoding import RowState, Steps, UniformDiffusion


@dataclass
class Step:
    """A step of the decoder: the canvas before the step, the model's predictions, and what was accepted."""

    canvas_before: list[int]
    temperature: float
    entropy: list[float]
    """Entropy of the model's distribution at every place."""
    accepted: list[int]
    """1 at places whose sample was accepted, else 0."""
    draft: list[int]
    """The most probable token at every place."""


@dataclass
class Draws:
    """The random draws of a run of the other program, and the steps of our decoder.

    Attributes:
        noise: Random canvases, first and renoised, in the order in which they were drawn.
        sampled: Canvases that were sampled from the model's probabilities.
        steps: The steps of our decoder so far.
    """

    noise: Iterator[Sequence[int]]
    sampled: Iterator[Sequence[int]]
    steps: list[Step] = field(default_factory=list)


DRAWS: dict[str, Draws] = {}
"""The draws of the runs in progress, by the prompt's id."""


@dataclass(frozen=True, kw_only=True)
class Replayed(UniformDiffusion):
    """The decoder, whose noise and samples come from ``DRAWS``."""

    def random_tokens(self, state: RowState) -> list[int]:
        return [*next(DRAWS[state.prompt.id].noise)]

    def step(self, state: RowState) -> Steps[None]:
        draws = DRAWS[state.prompt.id]
        steps = super().step(state)
        readings = None
        while True:
            try:
                request = steps.send(readings)
            except StopIteration:
                return
            readings = yield request
            if request.canvas:
                [branch], [reading] = request.branches, readings
                entropies = [abs(value) for value in reading.statistic]
                reading.tokens = [*next(draws.sampled)]
                accepted = [int(kept) for kept in self.accept(entropies)]
                draws.steps.append(
                    Step([*branch.tokens], request.draw.sampling.temperature, entropies, accepted, reading.best)
                )


def recorded_draws(run: Mapping[str, Any]) -> Draws:
    """Return the draws of a run in a golden file."""
    canvases = iter(run["initial_canvases"])
    noise: list[Sequence[int]] = []
    for _, steps in groupby(run["steps"], key=lambda step: step["canvas_number"]):
        noise += [next(canvases), *(step["renoise"] for step in steps)]
    return Draws(iter(noise), iter([step["sampled"] for step in run["steps"]]))
