"""Draft masks in the fused backbone: tokens with learnt embeddings, at which a drafter's adapters act."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.drafter import Drafter


@dataclass(frozen=True, slots=True)
class _Stacked:
    """Adapters of several linear layers with the same input: one shared down-projection, one up-projection each."""

    down: Float[Tensor, "input stacked_rank"]
    ups: tuple[Float[Tensor, "rank _"], ...]

    def low(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the product down for each layer."""
        return (x.to(self.down.dtype) @ self.down).chunk(len(self.ups), -1)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Adapters of one block."""

    attention: _Stacked
    output: _Stacked
    mlp: _Stacked
    down: _Stacked


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
        self._first_id = embedding.shape[0]
        self._embedding = drafter.masks.detach().to(embedding.dtype)
        is_low = embedding.device.type == "cpu" and embedding.dtype.itemsize < 4
        dtype = torch.float32 if is_low else embedding.dtype

        def stacked(layer: int, names: Sequence[str]) -> _Stacked:
            adapters = [drafter.adapter(f"layers-{layer}-{name}") for name in names]
            down = torch.cat([adapter.down.detach() * adapter.scale for adapter in adapters])
            return _Stacked(down.to(dtype).t(), tuple(adapter.up.detach().to(dtype).t() for adapter in adapters))

        self.layers = [
            LayerAdapters(
                stacked(number, ("self_attn-q_proj", "self_attn-k_proj", "self_attn-v_proj")),
                stacked(number, ("self_attn-o_proj",)),
                stacked(number, ("mlp-gate_proj", "mlp-up_proj")),
                stacked(number, ("mlp-down_proj",)),
            )
            for number in range(num_layers)
        ]

    def gate(self, ids: Int[Tensor, " token"]) -> DraftGate | None:
        """Return where a forward's draft masks are; on CPUs ``None`` if it has none."""
        is_mask = ids >= self._first_id
        if ids.device.type != "cpu":  # looking for the rows would make the host wait
            return DraftGate(None, is_mask[:, None])
        rows = is_mask.nonzero()[:, 0]
        if not len(rows):
            return None
        first = int(rows[0])
        last = int(rows[-1])
        is_run = last - first == len(rows) - 1
        return DraftGate(slice(first, last + 1) if is_run else rows, None)

    def embed(
        self, ids: Int[Tensor, " token"], embedding: Float[Tensor, "row hidden"], gate: DraftGate
    ) -> Float[Tensor, "token hidden"]:
        """Return embeddings of tokens and draft masks."""
        hidden = F.embedding(ids.clamp(max=self._first_id - 1), embedding)
        if gate.rows is not None:
            hidden[gate.rows] = F.embedding(ids[gate.rows] - self._first_id, self._embedding)
            return hidden
        assert gate.factor is not None
        return torch.where(gate.factor, F.embedding((ids - self._first_id).clamp(min=0), self._embedding), hidden)


@dataclass(frozen=True, slots=True)
class DraftGate:
    """Which tokens of a forward are draft masks.

    Attributes:
        rows: Their places; ``None`` to compute the adapters for all tokens and multiply by ``factor``.
        factor: Whether each token is one [token, 1].
    """

    rows: slice | Tensor | None
    factor: Tensor | None

    def add(self, adapters: _Stacked, x: Float[Tensor, "token input"], *outputs: Float[Tensor, "token _"]) -> None:
        """Add the adapters' updates to the outputs of linear layers, in place, for draft masks only."""
        low = adapters.low(x if self.rows is None else x[self.rows])
        for output, part, up in zip(outputs, low, adapters.ups, strict=True):
            if self.factor is not None:
                output.add_(part @ up * self.factor)
            elif not isinstance(self.rows, slice):
                output.index_add_(0, self.rows, (part @ up).to(output.dtype))  # type: ignore[arg-type] - a tensor by now
            elif output.dtype == up.dtype:
                output[self.rows].addmm_(part, up)
            else:
                output[self.rows].add_(part @ up)
