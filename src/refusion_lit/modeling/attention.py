"""Attention masks: those of each attention pattern, and the conversions that the attention kernels need."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from refusion_lit.modeling.range_mask import CHUNK, RangeMask
from refusion_lit.modeling.transfer import to_device
from refusion_lit.modeling.visibility import AttentionMask, Visibility, as_mask
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


def sdpa_mask(attention: AttentionMask, num_keys: int, device: torch.device) -> Tensor:
    """Convert a mask for :func:`torch.nn.functional.scaled_dot_product_attention`, with an axis for heads.

    Ranges of long sequences become a :class:`RangeMask` on CPUs. Accelerators get the matrix: flex attention, which is
    fast there, needs none.
    """
    if isinstance(attention, Tensor) and attention.ndim == 4 and device.type == "cpu" and num_keys > 2 * CHUNK:
        return RangeMask.of(attention)
    return as_mask(attention, device, num_keys)[:, None]


def additive_mask(
    attention: AttentionMask, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "batch 1 token key"]:
    """Convert a mask to what is added to attention scores: 0 or -inf."""
    if isinstance(attention, Visibility) and device.type == "cpu":
        return attention.additive_mask().to(dtype)[:, None]
    return torch.where(as_mask(attention, device, num_keys), 0.0, -torch.inf).to(dtype)[:, None]


def block_mask(attention: AttentionMask, num_keys: int, device: torch.device) -> BlockMask:
    """Convert a mask to flex attention's block mask; ranges need no matrix.

    Args:
        attention: What each token sees.
        num_keys: Number of keys, for ranges without spans.
        device: Device of the states.
    """
    if isinstance(attention, Visibility):
        return _block_mask_of_ranges(to_device(attention.ranges(), device), attention.num_keys)
    if attention.ndim == 4:
        return _block_mask_of_ranges(attention, num_keys)
    num_rows, num_queries, num_keys = attention.shape
    return create_block_mask(
        lambda row, _head, query, key: attention[row, query, key],
        B=num_rows, H=None, Q_LEN=num_queries, KV_LEN=num_keys, device=str(device),
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
