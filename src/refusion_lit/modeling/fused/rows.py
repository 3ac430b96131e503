"""Shared code of the fused backbone's attention implementations: the batch's layout, and attention over padded rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


@runtime_checkable
class Attention(Protocol):
    """Attention of one forward."""

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "token head dim"],
        key: Float[Tensor, "token key_head dim"],
        value: Float[Tensor, "token key_head dim"],
    ) -> Float[Tensor, "token head dim"]:
        """Store a layer's keys and values of the real tokens, and return the heads' outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Places of the real tokens (all but padding) in a padded batch.

    Attributes:
        shape: Of the batch.
        real: Their flat indices, in the order they are computed in; ``None`` if nothing is padding.
    """

    shape: torch.Size
    real: Tensor | None

    def padded(self, states: Tensor) -> Tensor:
        """Scatter states of the real tokens to their places [tokens of all rows, ...]; zeros at padding."""
        if self.real is None:
            return states
        return states.new_zeros(self.shape.numel(), *states.shape[1:]).index_copy_(0, self.real, states)

    def real_of(self, states: Tensor) -> Tensor:
        """Take the states of the real tokens."""
        return states if self.real is None else states[self.real]


def additive_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores [row, 1, query, key]."""
    return torch.where(mask, 0.0, -torch.inf).to(dtype)[:, None]


_MOST_SHARING = 32
"""On CPUs, up to this many bfloat16 queries of heads that share keys run faster as one head (shared_heads.py)."""


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Attend row by row.

    Args:
        query: States [row, place, head, dim].
        key: Likewise; there may be fewer heads, which query heads share.
        value: Likewise.
        mask: What is added to scores [row, 1, place, key]; ``None`` for none.
        is_causal: Whether the i-th query sees the first i keys; goes without a mask.

    Returns:
        The heads' outputs, laid out like the queries.
    """
    num_queries, times = query.shape[1], query.shape[2] // key.shape[2]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    if times == 1:
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    elif query.device.type != "cpu":  # with a mask, only CPUs have a fast kernel for grouped heads
        key, value = (_repeated(states, times) for states in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    elif is_causal or query.element_size() > 2 or times * num_queries > _MOST_SHARING:
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=True)
    else:
        query = rearrange(query, "row (key_head times) place dim -> row key_head (times place) dim", times=times)
        mask = None if mask is None else mask.repeat(1, 1, times, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        mixed = rearrange(mixed, "row key_head (times place) dim -> row (key_head times) place dim", times=times)
    return mixed.transpose(1, 2)


def _repeated(states: Tensor, times: int) -> Tensor:
    """Repeat every key/value head [row, head, key, dim] for the query heads that share it."""
    return states[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
