"""Loaders for evaluation: every sample exactly once, on any number of processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.collate import BatchDataset
from refusion_lit.data.encoding import encode_prompt
from refusion_lit.data.templates import given_tokens
from refusion_lit.tasks.base import Task, examples_of
from refusion_lit.types import Example, Prompt, PromptBatch
from refusion_lit.utils.require import require


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """An example with its encoded prompt, and what is given of its response, for decoding."""

    example: Example
    prompt_ids: Sequence[int]
    given: tuple[int | None, ...] = ()


class PromptDataset(Dataset[EncodedPrompt]):
    """Examples whose prompts are encoded when they are read.

    Args:
        examples: The examples.
        tokenizer: Encodes their prompts.
        prompt_template: How a query becomes a prompt where the tokenizer has no chat template.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> None:
        self._examples, self._tokenizer, self._template = examples, tokenizer, prompt_template

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    def __getitem__(self, index: int) -> EncodedPrompt:
        """Return an example with its encoded prompt."""
        example = self._examples[index]
        prompt = encode_prompt(self._tokenizer, example.query, self._template, example.messages)
        return EncodedPrompt(example, prompt, given_tokens(self._tokenizer, example))


def collate_prompts(samples: Sequence[EncodedPrompt]) -> PromptBatch:
    """Collect prompts; the engine needs no padding."""
    prompts = [
        Prompt(token_ids=tuple(sample.prompt_ids), id=sample.example.id, given=sample.given) for sample in samples
    ]
    return PromptBatch(prompts=prompts, examples=[sample.example for sample in samples])


class EvaluationBatches(DistributedSampler[list[int]]):
    """Gives each process a contiguous share of the samples, in batches, and repeats no sample.

    The shares joined in the order of ranks are all samples in order. All processes have the same number of batches, as
    strategies that gather weights in every forward need it: a process with one sample too many puts it in its last
    batch. A process without samples has one empty batch, because Lightning skips the epoch-end hooks, in which
    processes wait for one another, where there are no batches.

    It yields whole batches: a loader takes it as ``sampler`` with ``batch_size=None``. Lightning leaves a
    ``DistributedSampler`` in place, but replaces other samplers by its own, which repeats samples.

    Args:
        num_samples: Number of samples in the dataset.
        batch_size: Number of samples in a batch, on each process.
        rank: Index of this process.
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


class EvaluationLoaders(L.LightningDataModule):
    """The data module's loaders for test and prediction; the subclass sets the options."""

    task: Task
    prompt_template: str
    eval_batch_size: int
    num_workers: int
    max_eval_prompts: int | None

    @property
    def built_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        raise NotImplementedError

    def test_dataloader(self) -> DataLoader[EncodedPrompt]:
        """Return a loader of the test split's prompts.

        Raises:
            ValueError: If there are none.
        """
        prompts = self._test_prompts()
        require(len(prompts) > 0, "data.task", "examples in the test split", 0, "give the task some to decode")
        return self._evaluation_loader(prompts, collate_prompts)

    def predict_dataloader(self) -> DataLoader[EncodedPrompt]:
        """Return a loader of the test split's prompts."""
        return self.test_dataloader()

    def test_prompts(self) -> list[EncodedPrompt]:
        """Return the encoded prompts of the test split.

        Raises:
            ValueError: If two examples have the same id, which would make one of their results the other's.
        """
        prompts = self._test_prompts()
        encoded = [prompts[i] for i in range(len(prompts))]
        (name, count), *_ = Counter(prompt.example.id for prompt in encoded).most_common(1) or [("", 1)]
        require(count == 1, "data.task", "examples with different ids", name, "rename one of them")
        return encoded

    def sample_prompts(self, count: int) -> PromptBatch:
        """Return the first prompts of the validation split."""
        prompts = self._prompts(self.task.examples("validation"))
        return collate_prompts([prompts[i] for i in range(min(count, len(prompts)))])

    def _test_prompts(self) -> PromptDataset:
        examples = examples_of(self.task, "test")
        if self.max_eval_prompts is not None:
            examples = [examples[i] for i in range(min(self.max_eval_prompts, len(examples)))]
        return self._prompts(examples)

    def _prompts(self, examples: Sequence[Example]) -> PromptDataset:
        return PromptDataset(examples, self.built_tokenizer, self.prompt_template)

    def _evaluation_loader(self, data: Dataset[Any], collate: Callable[[list[Any]], Any]) -> DataLoader[Any]:
        """Return a loader of all samples in order, shared by the processes without repetition."""
        num_ranks = 1 if self.trainer is None else self.trainer.world_size
        size, workers = self.eval_batch_size, self.num_workers
        if self.trainer is None or num_ranks == 1 or getattr(self.trainer, "overfit_batches", 0):
            return DataLoader(data, batch_size=size, num_workers=workers, collate_fn=collate)
        num_samples = len(data)  # type: ignore[arg-type] - all of ours have a length
        share = EvaluationBatches(num_samples, size, rank=self.trainer.global_rank, num_ranks=num_ranks)
        return DataLoader(BatchDataset(data, collate), sampler=share, batch_size=None, num_workers=workers)
