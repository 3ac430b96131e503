"""Batches of similar lengths, in an order that is a function of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import Sampler

from refusion_lit.noise import stable_key


class LengthGroupedBatches(Sampler[list[int]]):
    """Shuffles samples, sorts them by length within groups of batches, and shuffles the batches.

    Every sample is seen once an epoch over all ranks, except a remainder smaller than one global batch.

    Args:
        num_samples: Samples of the data set.
        batch_size: Samples a batch, on each rank.
        length_of: Returns a sample's length (or anything that grows with it); ``None`` groups nothing.
        seed: Seeds the order.
        rank: This process's number.
        num_ranks: Number of processes.
        group_batches: Global batches sorted together.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        length_of: Callable[[int], int] | None,
        *,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        group_batches: int = 16,
    ) -> None:
        self._num_samples, self.batch_size, self._length_of = num_samples, batch_size, length_of
        self._seed, self._rank, self._num_ranks = seed, rank, num_ranks
        self._group = group_batches * batch_size * num_ranks
        self._epoch = 0
        if len(self) == 0:
            raise ValueError(
                f"batch_size: expected at most {num_samples // num_ranks} ({num_samples} samples over {num_ranks} "
                f"processes), got {batch_size}; make it smaller."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; Lightning calls this."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of this rank's batches an epoch."""
        return self._num_samples // (self.batch_size * self._num_ranks)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of sample indices."""
        random = np.random.default_rng(stable_key("order", self._seed, self._epoch) & (1 << 63) - 1)
        order = random.permutation(self._num_samples)
        size = self.batch_size * self._num_ranks
        order = order[: len(self) * size]
        for start in range(0, len(order), self._group):
            group = order[start : start + self._group]
            if self._length_of is not None:
                lengths = np.fromiter((self._length_of(int(i)) for i in group), dtype=np.int64, count=len(group))
                group = group[np.argsort(lengths, kind="stable")]
            batches = group.reshape(-1, size)
            for batch in batches[random.permutation(len(batches))]:
                yield batch[self._rank :: self._num_ranks].tolist()
