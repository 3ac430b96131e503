"""Weights of masked tokens by their place in the slot: the first one must come from its mask, later ones need not."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

TokenWeights = Literal["equal", "harmonic", "harmonic_normalised"]
"""Laws of the weights in a slot."""


def place_weights(
    law: TokenWeights,
    place: Int[Tensor, "batch token"],
    length: Int[Tensor, "batch token"],
    mask_probability: Float[Tensor, " batch"],
    *,
    eps: float,
    max_length: int,
) -> Float[Tensor, "batch token"]:
    """Return the factor of each token's weight 1 / p.

    Args:
        law: ``harmonic``: 1 / q_j in place of 1 / p, where q_j grows linearly from about p / n at the slot's first
            token to p at its last one (``ordered_sampling`` of Zarya); a slot's weights then add up to H_n = 1 + 1/2 +
            ... + 1/n times as much. ``harmonic_normalised``: proportional to 1 / (j + 1), with a mean of 1 in a slot.
        place: Place of each token in its slot, j from 0.
        length: Tokens of its slot, n.
        mask_probability: p of each row.
        eps: Smallest mask probability.
        max_length: An upper bound of ``length`` that the host knows.
    """
    if law == "equal":
        return torch.ones_like(place, dtype=torch.float64)
    if law == "harmonic_normalised":
        numbers = torch.arange(1, max_length + 1, device=place.device, dtype=torch.float64).reciprocal().cumsum(0)
        return length / ((place + 1) * numbers[length - 1])
    p = mask_probability.double()[:, None]
    # For the least probabilities the first one would exceed the last.
    first = (eps + (1 - eps) * p / length).minimum(p)
    alone = (eps + (1 - eps) * p + p) / 2
    own = torch.where(length == 1, alone, first + (p - first) * place / (length - 1).clamp(min=1))
    return p / own
