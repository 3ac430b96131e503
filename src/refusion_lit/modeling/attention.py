"""Attention over ranges of keys, for training: flex attention's mask, and sdpa in chunks on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint

from refusion_lit.modeling.devices import to_device
from refusion_lit.modeling.visibility import AttentionMask, Visibility, ranges_mask

_BLOCK = 128
"""Number of queries, and of keys, in a block of flex attention's mask."""

CHUNK = 128
"""Number of queries whose mask is in memory at once on CPUs."""


def block_mask(attention: AttentionMask, num_keys: int, device: torch.device) -> BlockMask:
    """Convert a mask to flex attention's block mask; ranges need no matrix.

    Args:
        attention: What each token sees.
        num_keys: Number of keys, for ranges without spans.
        device: Device of the states.
    """
    if isinstance(attention, Visibility):
        ranges = to_device(attention.ranges(), device)
        num_keys = attention.num_keys
    elif attention.ndim == 4:
        ranges = attention
    else:
        num_rows, num_queries, num_keys = attention.shape
        return create_block_mask(
            lambda row, _head, query, key: attention[row, query, key],
            B=num_rows, H=None, Q_LEN=num_queries, KV_LEN=num_keys, device=str(device),
        )  # fmt: skip
    starts, stops = ranges.unbind(-1)
    num_tokens = ranges.shape[1]

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= starts[row, query, 0]) & (key < stops[row, query, 0])
        for i in range(1, ranges.shape[2]):
            seen = seen | ((key >= starts[row, query, i]) & (key < stops[row, query, i]))
        return seen

    first = torch.arange(0, num_keys, _BLOCK, device=ranges.device)
    starts_before = starts[..., None] < first + _BLOCK
    stops_after = stops[..., None] > first
    overlaps = (starts_before & stops_after & (starts < stops)[..., None]).any(2)
    overlaps = F.pad(overlaps, (0, 0, 0, -num_tokens % _BLOCK))
    seen = rearrange(overlaps, "row (query_block token) key_block -> row 1 query_block token key_block", token=_BLOCK)
    seen = seen.any(-2)
    index = seen.int().argsort(dim=-1, descending=True, stable=True)  # blocks that are seen come first
    return BlockMask.from_kv_blocks(
        seen.sum(-1, dtype=torch.int32), index.int(), BLOCK_SIZE=_BLOCK, mask_mod=sees,
        seq_lengths=(num_tokens, num_keys),
    )  # fmt: skip


class RangeMask(Tensor):
    """Ranges [batch, token, range, 2] that ``scaled_dot_product_attention`` takes in place of a mask.

    Attention runs in chunks of queries; a chunk skips the keys that none of its queries sees. The backward pass
    recomputes a chunk's mask and scores, so memory grows linearly with the length, not with its square. transformers
    passes masks with four axes through unchanged, in every architecture and through gradient checkpointing.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunctionSubclass():  # the ranges are a plain tensor from here on
                return _attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _attend(
    query: Float[Tensor, "batch head token dim"],
    key: Float[Tensor, "batch key_head key dim"],
    value: Float[Tensor, "batch key_head key dim"],
    attn_mask: RangeMask,
    **options: Any,  # noqa: ANN401 - dropout_p, is_causal, scale, enable_gqa
) -> Float[Tensor, "batch head token dim"]:
    if attn_mask.shape[2] == 1 and (attn_mask == attn_mask[:, :1]).all():  # all tokens of a row see the same
        return _chunk(query, key, value, attn_mask[:, :1], options)
    chunks = zip(query.split(CHUNK, 2), attn_mask.split(CHUNK, 1), strict=True)
    return torch.cat([checkpoint(_chunk, q, key, value, mask, options, use_reentrant=False) for q, mask in chunks], 2)


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, ranges: Int[Tensor, "batch token range 2"], options: dict[str, Any]
) -> Tensor:
    """Compute attention for a chunk of queries. If all see the same keys, ``ranges`` may have a single token."""
    used = ranges[ranges[..., 0] < ranges[..., 1]]
    first = int(used[:, 0].min())
    stop = int(used[:, 1].max())
    key = key[:, :, first:stop]
    value = value[:, :, first:stop]
    mask = ranges_mask(ranges - first, stop - first)[:, None]
    return F.scaled_dot_product_attention(query, key, value, None if mask.all() else mask, **options)
