"""Attention masks as ranges of keys, for training and likelihoods: a few integers per token instead of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 128
"""Number of queries whose mask is in memory at once on CPUs."""


def ranges_mask(ranges: Int[Tensor, "batch token range 2"], num_keys: int) -> Bool[Tensor, "batch token key"]:
    """Return the mask matrix of ranges; each token sees the union of its ranges ``(start, stop)`` of keys."""
    keys = torch.arange(num_keys, device=ranges.device)
    return ((keys >= ranges[..., 0, None]) & (keys < ranges[..., 1, None])).any(-2)


class RangeMask(Tensor):
    """Ranges [batch, token, range, 2] that ``scaled_dot_product_attention`` takes in place of a mask.

    Attention runs in chunks of queries, each over the keys that some of them see. The backward pass recomputes each
    chunk's mask and scores, so memory grows linearly with the length, not with its square. transformers passes masks
    with four axes through unchanged, in every architecture and through gradient checkpointing.

    Attributes:
        plain: The ranges as a plain tensor.
    """

    plain: Tensor

    @classmethod
    def of(cls, ranges: Int[Tensor, "batch token range 2"]) -> RangeMask:
        """Wrap ranges."""
        mask = ranges.as_subclass(cls)
        mask.plain = ranges
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _attend(
    query: Float[Tensor, "batch head token dim"],
    key: Float[Tensor, "batch key_head key dim"],
    value: Float[Tensor, "batch key_head key dim"],
    attn_mask: RangeMask,
    **options: Any,  # noqa: ANN401 - dropout_p, is_causal, scale, enable_gqa
) -> Float[Tensor, "batch head token dim"]:
    ranges = attn_mask.plain
    if ranges.shape[2] == 1 and (ranges == ranges[:, :1]).all():  # all tokens of a row see the same
        return _chunk(query, key, value, ranges[:, :1], options)
    chunks = zip(query.split(CHUNK, 2), ranges.split(CHUNK, 1), strict=True)
    given = (key, value)
    return torch.cat([checkpoint(_chunk, q, *given, own, options, use_reentrant=False) for q, own in chunks], 2)


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, ranges: Int[Tensor, "batch token range 2"], options: dict[str, Any]
) -> Tensor:
    """Compute attention for a chunk of queries; of any size if ``ranges`` has one token for all of them."""
    used = ranges[ranges[..., 0] < ranges[..., 1]]
    first, stop = int(used[:, 0].min()), int(used[:, 1].max())
    key, value = key[:, :, first:stop], value[:, :, first:stop]
    mask = ranges_mask(ranges - first, stop - first)[:, None]
    return F.scaled_dot_product_attention(query, key, value, None if mask.all() else mask, **options)
