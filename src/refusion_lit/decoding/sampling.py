"""Drawing tokens from logits: the one place where temperature, top-p, top-k and noise are applied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refusion_lit.noise import KeyedNoise
from refusion_lit.types import SamplingParams

_BLOCK = 256


@dataclass(slots=True)
class Drawn:
    """Tokens drawn at several places.

    Attributes:
        tokens: The tokens; ties go to the lower id.
        filtered: Log-probabilities after temperature, top-k and top-p, from which the tokens were drawn.
    """

    tokens: Int[Tensor, " place"]
    filtered: Float[Tensor, "place vocab"]


def filter_logits(logits: Float[Tensor, "place vocab"], sampling: SamplingParams) -> Float[Tensor, "place vocab"]:
    """Apply temperature, then top-k, then top-p.

    Top-k keeps all tokens that tie with its last one. Top-p keeps the most probable tokens up to and including
    the one that crosses ``top_p``; at least one token is kept.

    Args:
        logits: Finite, or -inf for ids that are left out; at least one is finite.
        sampling: Temperature above 0, or 0, which filters nothing.
    """
    if sampling.temperature == 0:
        return logits
    # Relative to the highest, which then stays finite at any temperature.
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -math.inf)
    return logits


def first_argmax(logits: Float[Tensor, "place vocab"]) -> Int[Tensor, " place"]:
    """Return the index of each row's highest value, the lowest of equal ones; not-a-number is the highest of all.

    On CPUs torch looks for an index ten times as slowly as for the value, so that in large vocabularies a block with
    the value is looked for first.
    """
    vocab, size = logits.shape[-1], _BLOCK
    if logits.device.type != "cpu" or vocab < 32 * size:
        return logits.argmax(-1)
    num_blocks = vocab // size
    highest = logits[:, : num_blocks * size].unflatten(-1, (num_blocks, size)).amax(-1)
    if num_blocks * size < vocab:
        highest = torch.cat((highest, logits[:, num_blocks * size :].amax(-1, keepdim=True)), -1)
    # Behind the last value comes the last value again, which is never the first of its kind.
    index = (highest.argmax(-1, keepdim=True) * size + torch.arange(size)).clamp_max_(vocab - 1)
    return index.gather(-1, logits.gather(-1, index).argmax(-1, keepdim=True))[:, 0]


def draw(
    logits: Float[Tensor, "place vocab"],
    sampling: SamplingParams,
    noise_keys: Int[Tensor, " place"] | None,
) -> Drawn:
    """Draw one token at every place.

    At temperature 0 it is the most probable one. Above, Gumbel noise in float64 is added to the filtered
    logits (a draw from their softmax; lower precision would lower the effective temperature).

    Args:
        logits: Logits with banned ids at -inf.
        sampling: How to draw.
        noise_keys: Key of each place's noise; needed when the temperature is above 0.
    """
    filtered = filter_logits(logits, sampling)
    if sampling.temperature == 0:
        return Drawn(first_argmax(filtered), filtered)
    assert noise_keys is not None
    bits = KeyedNoise(noise_keys).bits("gumbel", logits.shape[-1])
    # The greatest of them would be rounded to 1, whose noise is infinite: minus infinity plus it is no number.
    uniform = ((bits.double() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-53)
    return Drawn((filtered.double() - (-uniform.log()).log()).argmax(-1), filtered)
