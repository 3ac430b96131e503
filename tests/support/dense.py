"""What the tokens of a corrupted batch see, as a matrix."""

from __future__ import annotations

from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch
from refusion_lit.modeling.visibility import ranges_mask


def attention_mask(corrupted: CorruptedBatch) -> Tensor | None:
    """Return a matrix [batch, query, key], ``True`` where a query sees a key; ``None``: causal attention."""
    return None if corrupted.visible is None else ranges_mask(corrupted.visible, corrupted.input_ids.shape[1])
