"""Attention masks as matrices [batch, query, key], for slow references."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from refusion_lit.learning.batch import CorruptedBatch
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.types import ModelTraits


def attention_mask(corrupted: CorruptedBatch) -> Tensor | None:
    """Return a batch's mask [batch, query, key], ``True`` where a query sees a key; ``None``: causal attention."""
    return None if corrupted.visible is None else ranges_mask(corrupted.visible, corrupted.input_ids.shape[1])


def order_mask(order: Int[Tensor, "batch token"], lengths: Int[Tensor, " batch"]) -> Bool[Tensor, "batch token token"]:
    """Build the mask in which a token sees every real token of the same or a lower order.

    Causal attention has order 0, 1, 2, ...; bidirectional attention has the same order everywhere; block-causal
    attention has the block's number.

    Args:
        order: Order of every token.
        lengths: Number of real tokens of each row. The padding after them is visible to itself only (a query
            without visible keys would give NaN).
    """
    index = torch.arange(order.shape[1], device=order.device)
    real = index[None] < lengths[:, None]
    allowed = (order[:, None, :] <= order[:, :, None]) & real[:, None, :]
    return allowed | torch.eye(order.shape[1], dtype=torch.bool, device=order.device)


def pattern_order(traits: ModelTraits, position_ids: Int[Tensor, "batch token"]) -> Int[Tensor, "batch token"]:
    """Return the order (see :func:`order_mask`) that a model's attention pattern gives to tokens.

    Args:
        traits: The model's traits.
        position_ids: Positions in the text. Causal attention follows the *sequence*, not these.
    """
    if traits.attention == "bidirectional":
        return torch.zeros_like(position_ids)
    if traits.attention == "block_causal":
        assert traits.block_size is not None
        return position_ids // traits.block_size
    return torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
