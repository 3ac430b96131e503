"""Lays the branches of many prompts out as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from refusion_lit.decoding.requests import Branch


class BatchLayout:
    """A padded batch of branches.

    Args:
        branches: The branches, in the order of their places.
        starts: Place of each branch's first token in the batch, laid end to end.
        shape: Rows and length of the batch.
        cached: Whether keys are cache entries, or the tokens of the row themselves.

    Attributes:
        ids: Tokens.
        positions: Their positions in the text.
        mask: Which entry or token a token sees.
        source: Places of the branches' tokens in the batch, laid end to end; ``None`` if they are all of it in order.
    """

    ids: Int[Tensor, "sequence token"]
    positions: Int[Tensor, "sequence token"]
    mask: Bool[Tensor, "sequence token key"]
    source: Int[Tensor, " token"] | None

    def __init__(
        self, branches: Sequence[Branch], starts: Sequence[int], shape: tuple[int, int], *, cached: bool
    ) -> None:
        tokens = np.array([token for branch in branches for token in branch.tokens])
        positions = np.array([position for branch in branches for position in branch.positions])
        mask = _mask(branches, starts, shape, cached=cached)
        source = None
        if len(tokens) < shape[0] * shape[1]:
            lengths = [len(branch.tokens) for branch in branches]
            source = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
            tokens, positions = (_scattered(values, source, shape) for values in (tokens, positions))
            _let_padding_see_something(mask, branches, starts, source, cached=cached)
        self.ids, self.positions = (torch.from_numpy(values.reshape(shape)) for values in (tokens, positions))
        self.mask = torch.from_numpy(mask)
        self.source = None if source is None else torch.from_numpy(source)


def _mask(
    branches: Sequence[Branch], starts: Sequence[int], shape: tuple[int, int], *, cached: bool
) -> np.ndarray:  # fmt: skip
    num_keys = shape[1]
    if cached:
        num_keys = max(max(b.write_at + len(b.tokens), *(stop for _, stop in b.visible), 0) for b in branches)
    mask = np.zeros((*shape, num_keys), dtype=bool)
    for branch, start in zip(branches, starts, strict=True):
        length = len(branch.tokens)
        row, offset = divmod(start, shape[1])
        own = branch.write_at if cached else offset
        rows = mask[row, offset : offset + length]
        for begin, end in branch.visible:
            rows[:, begin:end] = True
        if branch.order is None:
            rows[:, own : own + length] = _causal(length)
        else:
            order = np.asarray(branch.order)
            rows[:, own : own + length] = order[None, :] <= order[:, None]
    return mask


def _scattered(values: np.ndarray, places: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    padded = np.zeros(shape[0] * shape[1], dtype=np.int64)
    padded[places] = values
    return padded


def _let_padding_see_something(
    mask: np.ndarray, branches: Sequence[Branch], starts: Sequence[int], source: np.ndarray, *, cached: bool
) -> None:
    """Let padding see the first entry of its row: the softmax of a token that sees nothing is NaN."""
    is_padding = np.ones(mask.shape[:2], dtype=bool)
    is_padding.reshape(-1)[source] = False
    first_entries = np.zeros(mask.shape[0], dtype=np.int64)
    for branch, start in zip(branches, starts, strict=True):
        if cached and start % mask.shape[1] == 0:
            first_entries[start // mask.shape[1]] = branch.write_at
    row, offset = is_padding.nonzero()
    mask[row, offset, first_entries[row]] = True


@lru_cache(maxsize=256)
def _causal(size: int) -> np.ndarray:
    """Return a causal mask; read-only."""
    return np.tri(size, dtype=bool)


def write_indices(
    branches: Sequence[Branch], rows: Sequence[int]
) -> tuple[Int[Tensor, " token"], Int[Tensor, " token"]]:
    """Return the storage row and the cache index that each token is written to.

    Args:
        branches: The branches.
        rows: Storage row of each.
    """
    lengths = [len(branch.tokens) for branch in branches]
    indices = [np.arange(branch.write_at, branch.write_at + n) for branch, n in zip(branches, lengths, strict=True)]
    return torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(np.concatenate(indices))
