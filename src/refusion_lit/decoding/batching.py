"""Lays the branches of many prompts out as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from refusion_lit.decoding.requests import Branch
from refusion_lit.modeling.visibility import Span, Visibility


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
        visibility: Which entries or tokens each token sees.
        source: Places of the branches' tokens in the batch, laid end to end; ``None`` if they are all of it in order.
    """

    ids: Int[Tensor, "sequence token"]
    positions: Int[Tensor, "sequence token"]
    visibility: Visibility
    source: Int[Tensor, " token"] | None

    def __init__(
        self, branches: Sequence[Branch], starts: Sequence[int], shape: tuple[int, int], *, cached: bool
    ) -> None:
        tokens = np.array([token for branch in branches for token in branch.tokens])
        positions = np.array([position for branch in branches for position in branch.positions])
        source = None
        if len(tokens) < shape[0] * shape[1]:
            lengths = [len(branch.tokens) for branch in branches]
            source = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
            tokens, positions = (_scattered(values, source, shape) for values in (tokens, positions))
        self.ids, self.positions = (torch.from_numpy(values.reshape(shape)) for values in (tokens, positions))
        self.visibility = _visibility(branches, starts, shape, cached=cached)
        self.source = None if source is None else torch.from_numpy(source)


def _visibility(
    branches: Sequence[Branch], starts: Sequence[int], shape: tuple[int, int], *, cached: bool
) -> Visibility:
    spans = []
    for branch, start in zip(branches, starts, strict=True):
        sequence, offset = divmod(start, shape[1])
        spans.append(
            Span(
                sequence=sequence, offset=offset, length=len(branch.tokens),
                first_key=branch.write_at if cached else offset, context=branch.visible, order=branch.order,
            )
        )  # fmt: skip
    num_keys = shape[1]
    if cached:
        num_keys = max(max(b.write_at + len(b.tokens), *(stop for _, stop in b.visible), 0) for b in branches)
    return Visibility(spans, shape, num_keys)


def _scattered(values: np.ndarray, places: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    padded = np.zeros(shape[0] * shape[1], dtype=np.int64)
    padded[places] = values
    return padded


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
