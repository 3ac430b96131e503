"""Training samples that are encoded on access, or packed into rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from refusion_lit.data.examples import EncodedExample
from refusion_lit.noise import stable_key
from refusion_lit.tasks.base import Example
from refusion_lit.utils.require import require

_PACKED_TOGETHER = 4096
"""Number of samples to pack at a time. More samples need less padding; fewer samples mix lengths better."""


class LazyDataset(Dataset[EncodedExample]):
    """A dataset that generates and encodes an example on access.

    Args:
        examples: A generated task's examples.
        encode: Encodes an example; raises a ``ValueError`` if the example is malformed.
        max_length: Maximum example length in tokens; reading a longer example raises a ``ValueError``.

    Attributes:
        examples: The task's examples.
    """

    def __init__(
        self, examples: Sequence[Example], encode: Callable[[Example], EncodedExample], max_length: int
    ) -> None:
        self.examples = examples
        self._encode = encode
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> EncodedExample:
        sample = self._encode(self.examples[index])
        expected = f"at most {self.max_length} tokens in the sample {sample.id}"
        fix = "raise it, or make the task's examples shorter"
        require(len(sample) <= self.max_length, "data.max_length", expected, len(sample), fix)
        return sample

    def length(self, index: int) -> int:
        """Return a number that grows with the example's tokens, without encoding it."""
        example = self.examples[index]
        return len(example.query) + len(example.response)


def pack_rows(data: Sequence[EncodedExample], pack_length: int, *, seed: int) -> list[list[EncodedExample]]:
    """Pack samples into rows with :func:`pack_samples`, and print how much padding remains."""
    lengths = list(map(len, data))
    rows = pack_samples(lengths, pack_length, seed=seed)
    padding = 1 - sum(lengths) / (len(rows) * pack_length)
    rank_zero_info(f"train: {len(lengths)} samples packed in {len(rows)} rows, {padding:.1%} padding")
    return [[data[index] for index in row] for row in rows]


def pack_samples(lengths: Sequence[int], pack_length: int, *, seed: int) -> list[list[int]]:
    """Distribute samples over rows: best fit, longest first, within random groups of samples.

    Args:
        lengths: Sample lengths in tokens, at most ``pack_length``.
        pack_length: Maximum row length in tokens.
        seed: Seeds the groups; the rows are the same in every epoch.

    Returns:
        Sample indices by row.

    >>> pack_samples([5, 2, 3, 4], 7, seed=0)
    [[0, 1], [3, 2]]
    """
    order = np.random.default_rng(stable_key("packing", seed) & (1 << 63) - 1).permutation(len(lengths)).tolist()
    rows: list[list[int]] = []
    for first in range(0, len(order), _PACKED_TOGETHER):
        room: list[tuple[int, int]] = []  # (free tokens, index of the row), sorted
        for sample in sorted(order[first : first + _PACKED_TOGETHER], key=lambda i: -lengths[i]):
            best = bisect_left(room, (lengths[sample], -1))
            free, row = room.pop(best) if best < len(room) else (pack_length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(sample)
            insort(room, (free - lengths[sample], row))
    return rows
