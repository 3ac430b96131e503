"""Batches of similar lengths, in an order that is a function of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from refusion_lit.noise import stable_key
from refusion_lit.objectives.batch import ResponseBatch


class LengthGroupedBatches(DistributedSampler[list[int]]):
    """Shuffles samples, sorts them by length within groups of batches, and shuffles the batches.

    Every sample is seen once an epoch over all ranks, except a remainder smaller than one global batch.

    It yields whole batches, so a loader takes it as ``sampler`` with ``batch_size=None``. Being a
    ``DistributedSampler`` there is what makes Lightning tell it the epoch and leave it in place on several processes.

    Args:
        num_samples: Samples of the data set.
        batch_size: Samples a batch, on each rank.
        length_of: Returns a sample's length (or anything that grows with it); ``None`` groups nothing.
        seed: Seeds the order.
        rank: This process's number.
        num_ranks: Number of processes.
        group_batches: Global batches sorted together.

    Attributes:
        start: Batches of this rank that the next pass leaves out; zero again after it.
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
        if len(self) == 0:
            raise ValueError(
                f"batch_size: expected at most {num_samples // num_ranks} ({num_samples} samples over {num_ranks} "
                f"processes), got {batch_size}; make it smaller."
            )

    def __len__(self) -> int:
        """Return the number of this rank's batches an epoch, whatever ``start`` is."""
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
            turns = random.permutation(len(group) // size)
            left_out = min(max(start - num_before, 0), len(turns))
            num_before += len(turns)
            if left_out == len(turns):
                continue  # lengths of a lazy task's samples are not free
            if self._length_of is not None:
                lengths = np.fromiter((self._length_of(int(i)) for i in group), dtype=np.int64, count=len(group))
                group = group[np.argsort(lengths, kind="stable")]
            batches = group.reshape(-1, size)
            for batch in batches[turns[left_out:]]:
                yield batch[self.rank :: self.num_replicas].tolist()


class StepLoader(DataLoader[ResponseBatch]):
    """A loader that shows the first batch of every optimizer step the step's other batches.

    Losses are means over all batches of a step, whose counts must be known before the first backward pass.

    Attributes:
        num_left_in_step: Returns, for the index of a batch in the epoch, how many batches its step has from there on.
    """

    num_left_in_step: Callable[[int], int] = staticmethod(lambda _: 1)
    _num_yielded = 0

    def __iter__(self) -> Iterator[ResponseBatch]:  # type: ignore[override]
        """Yield batches; a step's batches are fetched together."""
        self._num_yielded = self._start()
        batches = super().__iter__()
        while step := list(islice(batches, self.num_left_in_step(self._num_yielded))):
            step[0].following = tuple(step[1:])
            for batch in step:
                self._num_yielded += 1
                yield batch

    def _start(self) -> int:
        """Return the index of the first batch."""
        return 0


class ResumableLoader(StepLoader):
    """A loader over :class:`LengthGroupedBatches` that a checkpoint in mid-epoch continues at the next batch.

    Lightning stores and restores the state of a loader that has these two methods.
    """

    sampler: LengthGroupedBatches  # type: ignore[assignment] - narrower than any loader's
    _resumed: tuple[int, int] | None = None

    def _start(self) -> int:
        """Find where to go on; called when the first batch is asked for, and the epoch has been set."""
        epoch, num_seen = self._resumed or (None, 0)
        self._resumed = None
        # A checkpoint written at the end of an epoch is resumed in the next one, from its beginning.
        self.sampler.start = num_seen if epoch == self.sampler.epoch else 0
        return self.sampler.start

    def state_dict(self) -> dict[str, Any]:
        """Return where training is: the epoch and this rank's batches handed out in it."""
        return {"epoch": self.sampler.epoch, "num_batches": self._num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the batches that were handed out."""
        self._resumed = (int(state["epoch"]), int(state["num_batches"]))
