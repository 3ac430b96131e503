"""Training batches: order of examples, padding, and a loader by optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from refusion_lit.data.examples import EncodedExample
from refusion_lit.data.fingerprint import SplitSamples
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.learning.step import MicroBatch, group_into_steps
from refusion_lit.noise import stable_key
from refusion_lit.utils.require import require


class BatchDataset(Dataset[Any]):
    """Maps a list of sample indices to a batch.

    Args:
        samples: The dataset.
        collate: Collates samples into a batch.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any]) -> None:  # noqa: ANN401 - examples or prompts
        self._samples = samples
        self._collate = collate

    def __getitem__(self, index: list[int]) -> Any:  # noqa: ANN401
        return self._collate([self._samples[i] for i in index])


_SORTED_BATCHES = 16
"""Number of global batches that are sorted by length together."""


class LengthGroupedBatches(DistributedSampler[list[int]]):
    """Shuffles samples, sorts them by length within groups of batches, and shuffles the batches.

    The order depends on seed and epoch only. All ranks together see every sample once per epoch, except a remainder
    smaller than a global batch.

    The sampler yields whole batches: a loader takes it as ``sampler`` with ``batch_size=None``. Lightning sets the
    epoch of a ``DistributedSampler``, and replaces other samplers on several processes.

    Args:
        num_samples: Dataset size.
        batch_size: Samples per batch and rank.
        get_length: Returns a sample's length, or a number that grows with the length; ``None``: no grouping.
        seed: Seeds the order.
        rank: Index of this process.
        num_ranks: Number of processes.
        pack_length: If samples are packed rows: the row length in tokens, which determines the samples in a row.

    Attributes:
        start: Number of this rank's batches to skip in the next pass, which resets it to zero.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        get_length: Callable[[int], int] | None,
        *,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        pack_length: int | None = None,
    ) -> None:
        super().__init__(range(num_samples), num_replicas=num_ranks, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self._num_samples = num_samples
        self._get_length = get_length
        self._group = _SORTED_BATCHES * batch_size * num_ranks
        self._pack_length = pack_length
        self.start = 0
        expected = f"at most {num_samples // num_ranks} ({num_samples} samples over {num_ranks} processes)"
        require(len(self) > 0, "data.batch_size", expected, batch_size, "make it smaller")

    @property
    def order(self) -> dict[str, int | None]:
        """The values that determine the order in an epoch, by option."""
        return {
            "data.pack_length": self._pack_length,
            "data.task": self._num_samples,
            "data.batch_size": self.batch_size,
            "data.seed": self.seed,
            "trainer.devices": self.num_replicas,
        }

    def __len__(self) -> int:
        """Return the number of this rank's batches per epoch; ``start`` does not change the number."""
        return self._num_samples // (self.batch_size * self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        start = self.start
        self.start = 0
        random = np.random.default_rng(stable_key("order", self.seed, self.epoch) & (1 << 63) - 1)
        size = self.batch_size * self.num_replicas
        order = random.permutation(self._num_samples)[: len(self) * size]
        for first in range(0, len(order), self._group):
            group = order[first : first + self._group]
            batch_order = random.permutation(len(group) // size)
            remaining = batch_order[start:]
            start = max(start - len(batch_order), 0)
            if not len(remaining):
                continue  # before any lengths, because computing the lengths of a lazy task takes time
            if self._get_length is not None:
                lengths = np.fromiter((self._get_length(int(i)) for i in group), dtype=np.int64, count=len(group))
                group = group[np.argsort(lengths, kind="stable")]
            for batch in group.reshape(-1, size)[remaining]:
                yield batch[self.rank :: self.num_replicas].tolist()


class TrainingLoader(DataLoader[ResponseBatch]):
    """Loads micro-batches, a whole optimizer step ahead, and resumes in mid-epoch.

    It yields every micro-batch with its :class:`~refusion_lit.learning.step.OptimizerStep`. Over
    :class:`LengthGroupedBatches`, a checkpoint from mid-epoch resumes at the next micro-batch: Lightning saves and
    restores a loader's state with ``state_dict`` and ``load_state_dict``.

    Attributes:
        trainer: The trainer, which has the number of accumulated micro-batches; ``None``: a micro-batch per step.
        split: The samples of all batches, whose fingerprint a checkpoint stores; ``None``: no fingerprint.
    """

    trainer: L.Trainer | None = None
    split: SplitSamples | None = None
    _num_yielded = 0
    _resumed: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:  # type: ignore[override]
        """Yield micro-batches; a step's micro-batches are all fetched before the first is yielded."""
        epoch, num_seen = self._resumed or (None, 0)
        self._resumed = None
        # A checkpoint from the end of an epoch resumes at the beginning of the next epoch.
        if isinstance(self.sampler, LengthGroupedBatches):  # it knows the epoch by now
            num_seen = num_seen if epoch == self.sampler.epoch else 0
            self.sampler.start = num_seen
            batches = super().__iter__()
        else:  # the same batches in all epochs, for overfit_batches
            num_seen %= self.trainer.num_training_batches if self.trainer else 1
            batches = islice(super().__iter__(), int(num_seen), None)
        self._num_yielded = int(num_seen)
        for batch in group_into_steps(batches, self._num_left_in_step):
            self._num_yielded += 1
            yield batch  # type: ignore[misc] - a micro-batch with its step, in place of the batch alone

    def _num_left_in_step(self) -> int:
        """Return how many micro-batches remain in the next micro-batch's step; the epoch's end may cut it short."""
        if self.trainer is None:
            return 1
        num_accumulated = self.trainer.accumulate_grad_batches
        num_left_in_epoch = max(self.trainer.num_training_batches - self._num_yielded, 1)
        return int(min(num_accumulated - self._num_yielded % num_accumulated, num_left_in_epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, this rank's number of yielded micro-batches, and the values that determine the order."""
        state = {"epoch": getattr(self.sampler, "epoch", 0), "num_batches": self._num_yielded}
        if isinstance(self.sampler, LengthGroupedBatches) and 0 < self._num_yielded < len(self.sampler):
            state["order"] = self.sampler.order
        if self.split is not None:
            state["samples"] = self.split.fingerprint
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the micro-batches that were yielded before the checkpoint.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            ValueError: In mid-epoch, if options or data give another order or other samples: samples would be repeated
                or left out. At the end of an epoch, other samples cause a warning only.
        """
        for option, value in state.get("order", {}).items():
            new_value = self.sampler.order[option] if isinstance(self.sampler, LengthGroupedBatches) else None
            unit = " samples" if option == "data.task" else ""  # whose value is the number of samples
            expected = f"{value}{unit}, with which the epoch began"
            require(new_value == value, option, expected, new_value, "resume with the options of the run's start")
        change = self.split.describe_change(state["samples"]) if self.split is not None and "samples" in state else ""
        if change:
            assert self.split is not None
            if "order" in state:
                raise ValueError(
                    f"{self.split.option}: expected the samples with which the epoch began, got {change}; restore the "
                    "data and the options that encode it, or start a new run from the exported weights as "
                    "model.backbone.source."
                )
            rank_zero_warn(
                f"{self.split.option}: {change}: training continues with the changed samples, so the final weights "
                "differ from an uninterrupted run."
            )
        self._resumed = (int(state["epoch"]), int(state["num_batches"]))


def collate_responses(samples: Sequence[EncodedExample], pad_token_id: int) -> ResponseBatch:
    """Pad examples on the right to the longest example's length; no examples give an empty batch.

    Args:
        samples: The examples.
        pad_token_id: The padding token.
    """
    pairs = [(sample.prompt_ids, sample.response_ids) for sample in samples]
    return ResponseBatch.from_pairs(pairs, ids=[sample.id for sample in samples], pad_token_id=pad_token_id)


def collate_packed(rows: Sequence[Sequence[EncodedExample]], pad_token_id: int) -> ResponseBatch:
    """Collate packed rows.

    Args:
        rows: Samples by row.
        pad_token_id: The padding token.
    """
    batch = collate_responses([sample for row in rows for sample in row], pad_token_id)
    return replace(batch, rows=torch.tensor([number for number, row in enumerate(rows) for _ in row]))
