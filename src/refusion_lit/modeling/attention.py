"""Attention masks of each attention pattern, always explicit: which query sees which key."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from refusion_lit.types import ModelTraits

_BLOCK = 128
"""Queries and keys of a block of flex attention's mask."""


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


def additive(mask: Bool[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to one that is added to attention scores (eager attention adds booleans as 0 and 1)."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def block_mask(
    mask: Bool[Tensor, "batch token key"] | Int[Tensor, "batch token range 2"], num_keys: int | None = None
) -> BlockMask:
    """Convert a mask to flex attention's block mask.

    Args:
        mask: A matrix, or ranges of keys, which need no matrix.
        num_keys: Number of keys; by default the number of the matrix's keys or, for ranges, the number of tokens.
    """
    if mask.ndim == 4:
        return _block_mask_of_ranges(mask, mask.shape[1] if num_keys is None else num_keys)
    num_rows, num_queries, num_keys = mask.shape
    return create_block_mask(
        lambda row, _head, query, key: mask[row, query, key],
        B=num_rows, H=None, Q_LEN=num_queries, KV_LEN=num_keys, device=str(mask.device),
    )  # fmt: skip


def _block_mask_of_ranges(ranges: Int[Tensor, "batch token range 2"], num_keys: int) -> BlockMask:
    starts, stops = ranges.unbind(-1)
    num_tokens = ranges.shape[1]

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= starts[row, query, 0]) & (key < stops[row, query, 0])
        for i in range(1, ranges.shape[2]):
            seen = seen | ((key >= starts[row, query, i]) & (key < stops[row, query, i]))
        return seen

    first = torch.arange(0, num_keys, _BLOCK, device=ranges.device)
    starts_before, stops_after = starts[..., None] < first + _BLOCK, stops[..., None] > first
    overlaps = (starts_before & stops_after & (starts < stops)[..., None]).any(2)
    overlaps = F.pad(overlaps, (0, 0, 0, -num_tokens % _BLOCK))
    seen = rearrange(overlaps, "row (query_block token) key_block -> row 1 query_block token key_block", token=_BLOCK)
    seen = seen.any(-2)
    index = seen.int().argsort(dim=-1, descending=True, stable=True)  # blocks that are seen come first
    return BlockMask.from_kv_blocks(
        seen.sum(-1, dtype=torch.int32), index.int(), BLOCK_SIZE=_BLOCK, mask_mod=sees,
        seq_lengths=(num_tokens, num_keys),
    )  # fmt: skip
