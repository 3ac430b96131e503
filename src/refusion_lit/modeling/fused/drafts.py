"""Draft masks in the fused backbone: tokens with learnt embeddings, at which a drafter's adapters act."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.modeling.drafter import Drafter

_JOINT = {
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

    Attributes:
        embedding: The body's embedding.
        first_id: Id of the first draft mask.
        masks: Embeddings of the draft masks.
    """

    def __init__(self, drafter: Drafter, embedding: Float[Tensor, "row hidden"], num_layers: int) -> None:
        self.embedding = embedding
        self.first_id = embedding.shape[0]
        self.masks = drafter.masks.detach().to(embedding.dtype)
        self._drafter = drafter
        self._num_layers = num_layers

    @cached_property
    def layers(self) -> list[dict[str, list[tuple[Tensor, Tensor]]]]:
        """Adapters of each block's products, as pairs of matrices down and up [input, rank], [rank, output].

        Made when the first draft mask comes: it takes as long as a forward, and many decodes have none.
        """
        is_low = self.embedding.device.type == "cpu" and self.embedding.dtype.itemsize < 4
        dtype = torch.float32 if is_low else self.embedding.dtype

        def adapter(name: str) -> tuple[Tensor, Tensor]:
            down, up = self._drafter.down[name], self._drafter.up[name]
            return (down.detach() * self._drafter.scale).to(dtype).t(), up.detach().to(dtype).t()

        return [
            {part: [adapter(f"layers-{number}-{name}") for name in names] for part, names in _JOINT.items()}
            for number in range(self._num_layers)
        ]

    def gate(self, ids: Int[Tensor, " token"]) -> DraftGate | None:
        """Return where a forward's draft masks are; on CPUs ``None`` if it has none."""
        is_mask = ids >= self.first_id
        if ids.device.type != "cpu":  # looking for the rows would make the host wait
            return DraftGate(self, is_mask[:, None], slice(None))
        rows = is_mask.nonzero()[:, 0]
        if not len(rows):
            return None
        first = int(rows[0])
        is_run = int(rows[-1]) - first == len(rows) - 1
        return DraftGate(self, is_mask[:, None], slice(first, first + len(rows)) if is_run else rows)


@dataclass(frozen=True, slots=True)
class DraftGate:
    """The tokens of a forward that are draft masks, and what they need.

    Attributes:
        drafts: The weights.
        is_mask: Whether each token is one [token, 1].
        rows: Their places, a slice where they follow one another; on accelerators all places, as the adapters are
            computed for all tokens there.
    """

    drafts: DraftMasks
    is_mask: Tensor
    rows: slice | Tensor

    def embed(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token hidden"]:
        """Return embeddings of tokens and draft masks."""
        first = self.drafts.first_id
        hidden = F.embedding(ids.clamp(max=first - 1), self.drafts.embedding)
        masks = F.embedding((ids - first).clamp(min=0), self.drafts.masks)
        return torch.where(self.is_mask, masks, hidden)

    def add(
        self, layer: int, part: str, x: Float[Tensor, "token input"], output: Float[Tensor, "token output"]
    ) -> None:
        """Add the adapters' updates to the output of linear layers, in place, for draft masks only."""
        adapters = self.drafts.layers[layer][part]
        x = x[self.rows].to(adapters[0][0].dtype)
        update = torch.cat([x @ down @ up for down, up in adapters], -1).to(output.dtype)
        if output.device.type == "cpu":
            output[self.rows] += update
        else:
            output.add_(update * self.is_mask)
