"""Measures the speeds of decoders, in turns on the same batches of prompts and in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from refusion_lit.decoding import Autoregressive, CallShapes, Decoder, DecodingOutput
from refusion_lit.modeling.devices import synchronised_time
from refusion_lit.reports.intervals import Interval, bootstrap
from refusion_lit.text_model import TextModel
from refusion_lit.types import LatencyOptions, Prompt, SamplingParams
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A decoder with the model that it decodes.

    Attributes:
        model: The model.
        decoder: The decoder.
        sampling: Length limit and sampling options.
        prompts: The prompts, tokenized for the model; all entrants have the same number of prompts in the same order.
        num_threads: Number of CPU threads while the decoder decodes; ``None``: the process's number.
    """

    model: TextModel
    decoder: Decoder
    sampling: SamplingParams
    prompts: Sequence[Prompt]
    num_threads: int | None = None


@dataclass(kw_only=True)
class Timings:
    """Tokens and seconds of one decoder at one batch size, batch by batch.

    Attributes:
        num_tokens: Number of committed tokens of every batch, EOS tokens included.
        seconds: Seconds of decoding of every batch, by the wall clock.
        call_shapes: The model's calls in all batches together.

    Example:
        >>> fast = Timings(num_tokens=[30, 30], seconds=[0.1, 0.2])
        >>> fast.tokens_per_second
        200.0
    """

    num_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    call_shapes: CallShapes = field(default_factory=CallShapes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds of all batches together."""
        return round(sum(self.num_tokens) / sum(self.seconds), 6)

    def over(self, other: Timings) -> Interval:
        """Return this decoder's speed divided by another decoder's, with a 95 % interval over batches.

        Every resample of the bootstrap draws the same batches for both decoders.

        Args:
            other: The speed of the other decoder on the same batches.
        """
        return bootstrap(
            lambda tokens, seconds, other_tokens, other_seconds: (tokens / seconds) / (other_tokens / other_seconds),
            self.num_tokens, self.seconds, other.num_tokens, other.seconds,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "num_tokens": self.num_tokens,
            "seconds": [round(value, 6) for value in self.seconds],
            "call_shapes": self.call_shapes.lines(),
        }


def measure_latency(
    entrants: Mapping[str, Entrant],
    options: LatencyOptions,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, dict[str, Timings]]:
    """Measure speeds in turns: every entrant decodes a batch before the next batch begins.

    Turns make ratios robust: other work on the machine slows all entrants alike. The order of the entrants rotates from
    batch to batch. Every entrant decodes one batch of every size beforehand, untimed.

    Args:
        entrants: Decoders with their models, by name; all have the same prompts.
        options: Prompts and batch sizes.
        seed: Draws the prompts of every batch.
        progress: Is called with the number of finished batches and the number of all batches.

    Returns:
        Speeds by batch size and name.
    """
    lengths = sorted({len(entrant.prompts) for entrant in entrants.values()})
    require(len(lengths) == 1, "entrants", "the same prompts for all", lengths, "pass lists of equal length")
    batches = {size: _draw_batches(lengths[0], size, options, seed) for size in options.batch_sizes}
    speeds = {size: {name: Timings() for name in entrants} for size in batches}
    num_done, num_batches = 0, len(entrants) * sum(len(drawn) + 1 for drawn in batches.values())
    for size, drawn in batches.items():
        for turn, indices in enumerate([drawn[0], *drawn]):
            names = list(entrants)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                seconds, output = _time_batch(entrants[name], indices)
                if turn > 0:  # the first batch warms up
                    speeds[size][name].seconds.append(seconds)
                    speeds[size][name].num_tokens.append(sum(row.num_tokens for row in output.rows))
                    speeds[size][name].call_shapes.merge(output.call_shapes)
                num_done += 1
                if progress is not None:
                    progress(num_done, num_batches)
    return speeds


def _draw_batches(num_prompts: int, size: int, options: LatencyOptions, seed: int) -> list[list[int]]:
    """Return indices of prompts for every batch; no batch repeats a prompt unless there are too few prompts."""
    generator = random.Random(seed)
    num_batches = max(options.min_batches, -(-min(options.num_prompts, num_prompts) // size))
    queue: list[int] = []
    batches = []
    for _ in range(num_batches):
        while len(queue) < size:
            order = list(range(num_prompts))
            generator.shuffle(order)
            queue += order
        batches.append(queue[:size])
        queue = queue[size:]
    return batches


def _time_batch(entrant: Entrant, indices: Sequence[int]) -> tuple[float, DecodingOutput]:
    """Decode a batch; return the wall-clock seconds and the output."""
    prompts = [entrant.prompts[index] for index in indices]
    device = entrant.model.backbone.device
    with _use_threads(entrant.num_threads):
        start = synchronised_time(device)
        output = entrant.model.decode(prompts, entrant.decoder, entrant.sampling, batch_size=len(prompts))
        return synchronised_time(device) - start, output


@contextmanager
def _use_threads(num_threads: int | None) -> Iterator[None]:
    """Set the number of torch's CPU threads; restore the old number at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summarize(timings: Mapping[int, Mapping[str, Timings]], baseline: str) -> dict[str, Any]:
    """Return JSON values for ``results.json``: tokens per second, and how many times as fast as the baseline.

    Args:
        timings: Timings by batch size and name, as :func:`measure_latency` returns them.
        baseline: Name of the entrant with which the others are compared.

    Returns:
        ``{"baseline": NAME, "decoders": {NAME: {SIZE: figures}}}``. ``times_baseline`` is an estimate with the ends of
        its 95 % interval over batches.
    """
    decoders: dict[str, dict[str, Any]] = {}
    for size, named in timings.items():
        for name, timing in named.items():
            ratio = timing.over(named[baseline])
            figures = {**timing.to_dict(), "times_baseline": [ratio.estimate, ratio.low, ratio.high]}
            decoders.setdefault(name, {})[str(size)] = figures
    return {"baseline": baseline, "decoders": decoders}


def choose_baseline(entrants: Mapping[str, Entrant]) -> str:
    """Return the first entrant that is decoded by ``Autoregressive``, or the first of all."""
    names = [name for name, entrant in entrants.items() if type(entrant.decoder) is Autoregressive]
    return [*names, *entrants][0]
