"""Flex attention over ragged rows: all tokens form one row of queries, the whole cache storage forms one row of keys.

There is no padding and no gathering of cache entries. Blocks of keys that no query of a block sees are skipped.
"""

from __future__ import annotations

import math
import warnings
from functools import cache as cached
from functools import reduce
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from refusion_lit.modeling.attention import block_mask
from refusion_lit.modeling.fused.rows import Rows
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.transfer import to_device
from refusion_lit.modeling.visibility import Visibility

_BLOCK = 128
"""Maximum number of queries and of keys in a block."""


class FlexAttention:
    """Attention of one forward through ``flex_attention``.

    It is compiled, once for all, unless the states are on a CPU, where it is slow and only a reference.

    Args:
        rows: The batch.
        visibility: Cache entries that they see or, without cache, tokens.
        cache: Prepared for the forward.
        device: Device of the states.
    """

    def __init__(self, rows: Rows, visibility: Visibility, cache: KVCache | None, device: torch.device) -> None:
        self._rows, self._cache = rows, cache
        if cache is None:
            self._mask = block_mask(_ranges_of(visibility, device))
        else:
            self._mask = _packed_mask(rows, _ranges_of(visibility, device), cache)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        if self._cache is None:
            query, key, value = (one.unflatten(0, (self._rows.shape[0], -1)) for one in (query, key, value))
        else:
            keys, values = self._cache.store(layer, key, value)
            query, key, value = query[None], keys.flatten(0, 1)[None], values.flatten(0, 1)[None]
        mixed = _flex(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self._mask)
        return mixed.transpose(1, 2).flatten(0, 1)


def _ranges_of(visibility: Visibility, device: torch.device) -> Int[Tensor, "sequence token range 2"]:
    """Return what each token sees, with 1, 2, 4, ... ranges: each number of ranges is a program of its own."""
    ranges = visibility.ranges()
    num_ranges = ranges.shape[2]
    return to_device(F.pad(ranges, (0, 0, 0, (1 << (num_ranges - 1).bit_length()) - num_ranges)), device)


def _packed_mask(rows: Rows, ranges: Int[Tensor, "sequence token range 2"], cache: KVCache) -> BlockMask:
    """Return who sees what among the real tokens and all that is stored, without a look at the values."""
    plan, capacity = cache.prepared, cache.capacity
    length = rows.shape[1]
    place = torch.arange(rows.shape.numel(), device=ranges.device) if rows.real is None else rows.real
    owner = place // length
    if plan.rows is not None:
        owner = plan.rows[owner]
    starts, stops = rows.real_of(ranges.flatten(0, 1)).unbind(-1)
    limits = [(owner * capacity + start, owner * capacity + stop)
              for start, stop in zip(starts.unbind(1), stops.unbind(1), strict=True)]  # fmt: skip

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reduce(torch.logical_or, [(first[query] <= key) & (key < stop[query]) for first, stop in limits])

    count, index = _blocks(owner, starts, stops, cache.num_rows, capacity)
    return BlockMask.from_kv_blocks(
        count[None, None],
        index[None, None],
        BLOCK_SIZE=(_BLOCK, math.gcd(capacity, _BLOCK)),
        mask_mod=sees,
        seq_lengths=(len(place), cache.num_rows * capacity),
        compute_q_blocks=False,  # only gradients need them
    )


def _blocks(
    owner: Int[Tensor, " token"],
    starts: Int[Tensor, "token range"],
    stops: Int[Tensor, "token range"],
    num_rows: int,
    capacity: int,
) -> tuple[Int[Tensor, " query_block"], Int[Tensor, "query_block key_block"]]:
    """Return how many blocks of keys each block of queries sees something of, and which: those first, then the rest."""
    num_tokens = len(owner)
    block = math.gcd(capacity, _BLOCK)
    first = torch.arange(0, capacity, block, device=owner.device)
    overlaps = (starts[..., None] < first + block) & (stops[..., None] > first) & (starts < stops)[..., None]
    some = overlaps.any(1)  # [token, block of its row]
    number = torch.arange(num_tokens, device=owner.device) // _BLOCK * num_rows + owner
    num_blocks = -(-num_tokens // _BLOCK)
    seen = torch.zeros(num_blocks * num_rows, some.shape[1], dtype=torch.int32, device=owner.device)
    seen = seen.index_add_(0, number, some.int()).view(num_blocks, -1) > 0
    index = seen.int().argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32), index.int()


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Return outputs of states [row, head, place, dim]."""
    grouped = query.shape[1] != key.shape[1]
    if query.device.type != "cpu":
        return _compiled()(query, key, value, block_mask=mask, enable_gqa=grouped)
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", message=r"flex_attention called without torch\.compile")
        found: Any = flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
    return found


@cached
def _compiled() -> Any:  # noqa: ANN401
    return torch.compile(flex_attention)
