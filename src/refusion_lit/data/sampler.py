"""Training batches: samples of similar lengths, grouped by optimizer step, resumable in mid-epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.utils.keys import stable_key
from refusion_lit.utils.require import require


class LengthGroupedBatches(DistributedSampler[list[int]]):
    """Shuffles samples, sorts them by length within groups of batches, and shuffles the batches.

    The order is a function of seed and epoch only. All ranks together see every sample once per epoch, except a
    remainder smaller than one global batch.

    It yields whole batches: a loader takes it as ``sampler`` with ``batch_size=None``. Lightning tells a
    ``DistributedSampler`` the epoch, and leaves it in place on several processes.

    Args:
        num_samples: Number of samples in the dataset.
        batch_size: Number of samples in a batch, on each rank.
        length_of: Returns a sample's length, or any number that grows with it; ``None``: no grouping.
        seed: Seeds the order.
        rank: Index of this process.
        num_ranks: Number of processes.
        group_batches: Number of global batches that are sorted together.

    Attributes:
        start: Number of this rank's batches that the next pass skips; reset to zero by it.
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
        super().__init__(range(num_samples), num_replicas=num_ranks, rank=rank, seed=seed)  # type: ignore[arg-type]
        self._num_samples, self.batch_size, self._length_of = num_samples, batch_size, length_of
        self._group = group_batches * batch_size * num_ranks
        self.start = 0
        expected = f"at most {num_samples // num_ranks} ({num_samples} samples over {num_ranks} processes)"
        require(len(self) > 0, "data.batch_size", expected, batch_size, "make it smaller")

    def __len__(self) -> int:
        """Return the number of this rank's batches per epoch; ``start`` does not change it."""
        return self._num_samples // (self.batch_size * self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of sample indices."""
        start, self.start = self.start, 0
        random = np.random.default_rng(stable_key("order", self.seed, self.epoch) & (1 << 63) - 1)
        size = self.batch_size * self.num_replicas
        order = random.permutation(self._num_samples)[: len(self) * size]
        num_before = 0
        for first in range(0, len(order), self._group):
            group = order[first : first + self._group]
            batch_order = random.permutation(len(group) // size)
            num_skipped = min(max(start - num_before, 0), len(batch_order))
            num_before += len(batch_order)
            if num_skipped == len(batch_order):
                continue  # before any lengths: those of a lazy task cost time
            if self._length_of is not None:
                lengths = np.fromiter((self._length_of(int(i)) for i in group), dtype=np.int64, count=len(group))
                group = group[np.argsort(lengths, kind="stable")]
            batches = group.reshape(-1, size)
            for batch in batches[batch_order[num_skipped:]]:
                yield batch[self.rank :: self.num_replicas].tolist()


class TrainingLoader(DataLoader[ResponseBatch]):
    """A loader of micro-batches that looks ahead by one optimizer step and resumes in mid-epoch.

    The first micro-batch of each step names the others (:attr:`ResponseBatch.following`): the loss is a mean over all
    of them, whose counts must be known before the first backward pass. Over :class:`LengthGroupedBatches`, a
    checkpoint from mid-epoch resumes at the next micro-batch: Lightning saves and restores the state of a loader with
    ``state_dict`` and ``load_state_dict``.

    Attributes:
        num_left_in_step: Returns, for the index of a micro-batch in the epoch, the number of micro-batches from there
            to the end of its step.
    """

    num_left_in_step: Callable[[int], int] = staticmethod(lambda _: 1)
    _num_yielded = 0
    _resumed: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[ResponseBatch]:  # type: ignore[override]
        """Yield micro-batches; those of a step are fetched together."""
        self._num_yielded = 0
        if isinstance(self.sampler, LengthGroupedBatches):  # it knows the epoch by now
            epoch, num_seen = self._resumed or (None, 0)
            # A checkpoint from the end of an epoch is resumed at the beginning of the next one.
            self.sampler.start = self._num_yielded = num_seen if epoch == self.sampler.epoch else 0
        self._resumed = None
        batches = super().__iter__()
        while step := list(islice(batches, self.num_left_in_step(self._num_yielded))):
            step[0].following = tuple(step[1:])
            for batch in step:
                self._num_yielded += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of this rank's micro-batches yielded in it."""
        return {"epoch": getattr(self.sampler, "epoch", 0), "num_batches": self._num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the micro-batches that were yielded."""
        self._resumed = (int(state["epoch"]), int(state["num_batches"]))
