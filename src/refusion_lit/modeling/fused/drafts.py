"""Draft masks in the fused backbone: tokens with learnt embeddings, at which a drafter's adapters act."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.drafter import Drafter


@dataclass(frozen=True, slots=True)
class _Stacked:
    """Adapters of linear layers that are one product, as one: calls cost more than the zeros off the diagonal."""

    down: Float[Tensor, "input stacked_rank"]
    up: Float[Tensor, "stacked_rank output"]


_STACKED = {
    "attention": ("self_attn-q_proj", "self_attn-k_proj", "self_attn-v_proj"),
    "output": ("self_attn-o_proj",),
    "mlp": ("mlp-gate_proj", "mlp-up_proj"),
    "down": ("mlp-down_proj",),
}
"""Linear layers of a block that are one product each."""


class DraftMasks:
    """The weights that draft masks need.

    Embeddings have the type of the body's. So have adapters, but float32 on CPUs, where small products are slow in
    lower precision.

    Args:
        drafter: The drafter.
        embedding: The body's embedding; ids from its end on are draft masks.
        num_layers: Blocks of the body.
    """

    def __init__(self, drafter: Drafter, embedding: Float[Tensor, "row hidden"], num_layers: int) -> None:
        self._drafter = drafter
        self._embedding = embedding
        self._first_id = embedding.shape[0]
        self._masks = drafter.masks.detach().to(embedding.dtype)
        self._num_layers = num_layers

    @cached_property
    def layers(self) -> list[dict[str, _Stacked]]:
        """Adapters of each block; stacking them takes half a forward, and many decodes have no draft masks."""
        numbers = range(self._num_layers)
        return [{part: self._stacked(number, names) for part, names in _STACKED.items()} for number in numbers]

    def _stacked(self, layer: int, names: Sequence[str]) -> _Stacked:
        is_low = self._embedding.device.type == "cpu" and self._embedding.dtype.itemsize < 4
        dtype = torch.float32 if is_low else self._embedding.dtype
        adapters = [self._drafter.adapter(f"layers-{layer}-{name}") for name in names]
        down = torch.cat([adapter.down.detach() * adapter.scale for adapter in adapters])
        up = torch.block_diag(*(adapter.up.detach().t() for adapter in adapters))
        return _Stacked(down.to(dtype).t(), up.to(dtype))

    def gate(self, ids: Int[Tensor, " token"]) -> DraftGate | None:
        """Return where a forward's draft masks are; on CPUs ``None`` if it has none."""
        is_mask = ids >= self._first_id
        if ids.device.type != "cpu":  # looking for the rows would make the host wait
            return DraftGate(None, None, is_mask[:, None])
        rows = is_mask.nonzero()[:, 0]
        if not len(rows):
            return None
        first = int(rows[0])
        is_run = int(rows[-1]) - first == len(rows) - 1
        return DraftGate((first, len(rows)), None, None) if is_run else DraftGate(None, rows, None)

    def embed(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token hidden"]:
        """Return embeddings of tokens and draft masks."""
        hidden = F.embedding(ids.clamp(max=self._first_id - 1), self._embedding)
        masks = F.embedding((ids - self._first_id).clamp(min=0), self._masks)
        return torch.where((ids >= self._first_id)[:, None], masks, hidden)


@dataclass(frozen=True, slots=True)
class DraftGate:
    """Which tokens of a forward are draft masks: all fields but one are ``None``.

    Attributes:
        run: First one and number, where they follow one another.
        rows: Their places.
        factor: Whether each token is one [token, 1], where the adapters are computed for all tokens.
    """

    run: tuple[int, int] | None
    rows: Tensor | None
    factor: Tensor | None

    def add(self, adapters: _Stacked, x: Float[Tensor, "token input"], output: Float[Tensor, "token output"]) -> None:
        """Add the adapters' updates to the output of linear layers, in place, for draft masks only."""
        if self.run is not None:
            x = x.narrow(0, *self.run)
            output = output.narrow(0, *self.run)
        elif self.rows is not None:
            x = x[self.rows]
        low = x.to(adapters.down.dtype) @ adapters.down
        if self.factor is not None:
            output.add_(low @ adapters.up * self.factor)
        elif self.rows is not None:
            output.index_add_(0, self.rows, (low @ adapters.up).to(output.dtype))
        elif output.dtype == low.dtype:
            output.addmm_(low, adapters.up)
        else:
            output.add_(low @ adapters.up)
