"""What the lean body's ways to attend share: the batch's layout, and what an attention is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


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
    """Where the tokens that are no padding stand in a padded batch.

    Attributes:
        shape: Of the batch.
        real: Their flat indices, in the order they are computed in; ``None`` if nothing is padding.
    """

    shape: torch.Size
    real: Tensor | None

    def padded(self, states: Tensor) -> Tensor:
        """Put states of the real tokens where they stand among all [tokens of all rows, ...]; zeros elsewhere."""
        if self.real is None:
            return states
        return states.new_zeros(self.shape.numel(), *states.shape[1:]).index_copy_(0, self.real, states)

    def real_of(self, states: Tensor) -> Tensor:
        """Take the states of the real tokens."""
        return states if self.real is None else states[self.real]
