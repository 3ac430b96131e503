"""How processes share evaluation: every sample exactly once, whatever the count."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data.distributed import DistributedSampler


class EvaluationBatches(DistributedSampler[list[int]]):
    """Gives each process a run of neighbouring samples, in batches, and repeats none to even them out.

    Joining the processes' samples in the order of their ranks gives the samples in order. All processes have the same
    number of batches, as strategies that gather weights in every forward need it: where one has a sample more than
    fills its batches, its last batch takes it. A process without any sample has one empty batch, for Lightning leaves
    out the ends of epochs, where processes wait for one another, on those without batches.

    It yields whole batches, so a loader takes it as ``sampler`` with ``batch_size=None``. Being a
    ``DistributedSampler`` keeps Lightning from putting its own there, which repeats samples.

    Args:
        num_samples: Samples of the data set.
        batch_size: Samples a batch, on each process.
        rank: This process's number.
        num_ranks: Number of processes.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> None:
        super().__init__(range(max(num_samples, 1)), num_replicas=num_ranks, rank=rank)  # type: ignore[arg-type]
        fewest, more = divmod(num_samples, num_ranks)
        start = rank * fewest + min(rank, more)
        self._share = list(range(start, start + fewest + (rank < more)))
        self._size = batch_size
        self._num_batches = max(-(-fewest // batch_size), 1)

    def __len__(self) -> int:
        """Return the number of batches, the same on all processes."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's batches of sample indices."""
        last = (self._num_batches - 1) * self._size
        for first in range(0, last, self._size):
            yield self._share[first : first + self._size]
        yield self._share[last:]
