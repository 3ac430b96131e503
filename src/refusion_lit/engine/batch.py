"""One call of the model: the forwards of many prompts as one padded batch.

Coordinates (docs/architecture.md has a picture): a *place* counts tokens of the response, a *position* tokens of the
text, an *offset* tokens of a branch, an *index* entries of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from refusion_lit.engine.requests import Forward
from refusion_lit.modeling.transfer import to_device
from refusion_lit.modeling.visibility import Span, Visibility


class Batch:
    """A padded batch of forwards.

    Args:
        forwards: The forwards; all of them use the cache, or none does.

    Attributes:
        ids: Tokens.
        positions: Their positions in the text.
        visibility: Which cache entries each token sees or, without a cache, which tokens of its sequence.
        source: Flat indices of the branches' tokens in the batch; ``None`` if the batch has no padding.
        sequences: The sequences of each forward.
        starts: Flat index of the first token of each branch, by forward.
    """

    ids: Int[Tensor, "sequence token"]
    positions: Int[Tensor, "sequence token"]
    visibility: Visibility
    source: Int[Tensor, " token"] | None
    sequences: list[slice]
    starts: list[list[int]]

    def __init__(self, forwards: Sequence[Forward]) -> None:
        shapes = [forward.shape for forward in forwards]
        length = max(shape[1] for shape in shapes)
        edges = [*accumulate((shape[0] for shape in shapes), initial=0)]
        self.sequences = [slice(first, stop) for first, stop in pairwise(edges)]
        self.starts = [
            [part.start * length + start for start in forward.starts(length)]
            for part, forward in zip(self.sequences, forwards, strict=True)
        ]
        self._branches = [branch for forward in forwards for branch in forward.branches]
        self._lengths = [len(branch.tokens) for branch in self._branches]
        shape = (edges[-1], length)
        starts = [*chain.from_iterable(self.starts)]
        tokens = np.array([*chain.from_iterable(branch.tokens for branch in self._branches)])
        positions = np.array([*chain.from_iterable(branch.positions for branch in self._branches)])
        self.source = None
        if len(tokens) < shape[0] * shape[1]:
            source = _ranges(starts, self._lengths)
            tokens = _scattered(tokens, source, shape)
            positions = _scattered(positions, source, shape)
            self.source = torch.from_numpy(source)
        self.ids = torch.from_numpy(tokens.reshape(shape))
        self.positions = torch.from_numpy(positions.reshape(shape))
        self.visibility = self._visibility(starts, shape, cached=forwards[0].cached)

    def _visibility(self, starts: Sequence[int], shape: tuple[int, int], *, cached: bool) -> Visibility:
        spans = []
        num_keys = 0 if cached else shape[1]
        for branch, start, length in zip(self._branches, starts, self._lengths, strict=True):
            sequence, offset = divmod(start, shape[1])
            first_key = branch.write_at if cached else offset
            spans.append(Span(sequence, offset, length, first_key, branch.visible, branch.order))
            num_keys = max(num_keys, first_key + length)
            for _, stop in branch.visible:
                num_keys = max(num_keys, stop)
        return Visibility(spans, shape, num_keys)

    def cache_plan(
        self, rows: Sequence[int], device: torch.device
    ) -> tuple[list[int], int, Int[Tensor, " token"] | None, Int[Tensor, " token"], Int[Tensor, " token"]]:
        """Return the arguments of :meth:`~refusion_lit.modeling.kv_cache.KVCache.prepare`.

        Args:
            rows: The cache's row of each forward.
            device: Device of the cache.
        """
        sequences = zip(rows, self.sequences, strict=True)
        of_sequence = [row for row, part in sequences for _ in range(part.start, part.stop)]
        of_branch = [row for row, own in zip(rows, self.starts, strict=True) for _ in own]
        source = None if self.source is None else to_device(self.source, device)
        row_index = to_device(np.repeat(of_branch, self._lengths), device)
        cache_index = to_device(_ranges([branch.write_at for branch in self._branches], self._lengths), device)
        return of_sequence, self.visibility.num_keys, source, row_index, cache_index


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """Return the concatenated ranges ``start`` to ``start + length - 1``."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + lengths[0])
    return np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])


def _scattered(values: np.ndarray, index: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    padded = np.zeros(shape[0] * shape[1], dtype=np.int64)
    padded[index] = values
    return padded
