"""The data module: a task and a tokenizer become batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

import lightning as L
import tokenizers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.bin_packing import PackedBatches, pack_samples
from refusion_lit.data.collate import (
    EncodedExample,
    EncodedPrompt,
    collate_prompts,
    collate_responses,
)
from refusion_lit.data.encoding import encode_example, encode_prompt
from refusion_lit.data.eval_batches import EvaluationBatches
from refusion_lit.data.sampler import LengthGroupedBatches, ResumableLoader, StepLoader
from refusion_lit.data.store import EncodedStore, encode_all, store_key
from refusion_lit.data.tokenizers import TokenizerSource, tokenizer_files
from refusion_lit.objectives.batch import ResponseBatch
from refusion_lit.tasks.base import Split, Task
from refusion_lit.types import Example, PromptBatch
from refusion_lit.utils.require import require, require_at_least

_Encode = Callable[[Example], tuple[list[int], list[int]]]
_LAZY_ABOVE = 20_000
"""Generated splits of more examples than this are encoded as they are drawn; everything else beforehand, once."""


class _Lazy(Dataset[EncodedExample]):
    """The examples of a generated task, made and encoded when they are asked for."""

    def __init__(self, examples: Sequence[Example], encode: _Encode, max_length: int) -> None:
        self._examples, self._encode, self._max_length = examples, encode, max_length

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> EncodedExample:
        example = self._examples[index]
        prompt, response = self._encode(example)
        sample = EncodedExample(example.id, prompt, response)
        if len(sample) > self._max_length:
            raise ValueError(
                f"data.max_length: expected samples of at most {self._max_length} tokens, got {len(sample)} in "
                f"{example.id}; raise it, or make the task's examples shorter."
            )
        return sample

    def length(self, index: int) -> int:
        """Return a length that grows with the number of tokens, without encoding."""
        example = self._examples[index]
        return len(example.query) + len(example.response)


class _Batches(Dataset[Any]):
    """Batches by the indices of their samples."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any]) -> None:  # noqa: ANN401 - two kinds
        self._samples, self._collate = samples, collate

    def __getitem__(self, index: list[int]) -> Any:  # noqa: ANN401
        return self._collate([self._samples[i] for i in index])


class _Prompts(Dataset[EncodedPrompt]):
    def __init__(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._examples, self._tokenizer, self._template = examples, tokenizer, template

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> EncodedPrompt:
        example = self._examples[index]
        return EncodedPrompt(example, encode_prompt(self._tokenizer, example.query, self._template, example.messages))


class InstructionDataModule(L.LightningDataModule):
    """Instruction data for training and decoding.

    Args:
        task: Where the examples come from, and how responses are scored.
        tokenizer: Where the tokenizer comes from.
        batch_size: Training samples a batch, on each process; with ``pack_length``, rows of several samples.
        eval_batch_size: Samples a batch in validation, and prompts a batch in test and prediction.
        max_length: Samples of more tokens (prompt and response) are dropped and counted; in a generated split that is
            encoded as it is drawn, one is an error.
        prompt_template: How a query becomes a prompt where the tokenizer has no chat template.
        length_grouped: Batch samples of similar lengths, which saves padding; without effect on packed samples.
        pack_length: Put several training samples in a row of at most so many tokens, at least ``max_length``; none sees
            another, and no loss changes. An objective that lengthens its sequences lengthens the rows. Attention
            over a row takes an explicit mask: rows much longer than the samples cost time with 'sdpa' and little with
            'flex_attention'. ``None``: one sample a row.
        malformed: What to do with a sample that cannot be encoded: stop with an ``error``, or ``skip`` and count it.
        num_workers: Processes that encode batches. Changes no batch.
        seed: Seeds the order of the training samples.
        max_eval_prompts: Decode only the first so many prompts in test and prediction; ``None`` for all.
        cache_dir: Directory that keeps encoded files from run to run, under a hash of their content, the tokenizer and
            the options; nothing tidies it up. ``None`` encodes once a run.

    Attributes:
        num_too_long: Samples that were dropped as too long, over the splits in use.
        num_malformed: Samples that were skipped, when they were read or encoded, over the splits in use.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: TokenizerSource,
        batch_size: int = 32,
        eval_batch_size: int = 128,
        max_length: int = 512,
        prompt_template: str = "{query}",
        length_grouped: bool = True,
        pack_length: int | None = None,
        malformed: Literal["error", "skip"] = "error",
        num_workers: int = 0,
        seed: int = 0,
        max_eval_prompts: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "eval_batch_size": eval_batch_size, "max_length": max_length}
        for option, value in sizes.items():
            require_at_least(f"data.{option}", value, 1)
        expected = f"at least max_length, which is {max_length}"
        require(pack_length is None or pack_length >= max_length, "data.pack_length", expected, pack_length,
                "raise it, lower max_length, or set it to null")  # fmt: skip
        holds = "{query}" in prompt_template
        require(holds, "data.prompt_template", "a text with {query} in it", prompt_template, "add {query}")
        self.task = task
        self.tokenizer_source = tokenizer
        self.batch_size, self.eval_batch_size, self.max_length = batch_size, eval_batch_size, max_length
        self.prompt_template, self.length_grouped, self.malformed = prompt_template, length_grouped, malformed
        self.pack_length = pack_length
        self.num_workers, self.seed, self.max_eval_prompts = num_workers, seed, max_eval_prompts
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._splits: dict[Split, _Lazy | EncodedStore] = {}
        self.num_too_long = 0
        self.num_malformed = 0

    @property
    def built_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, made at the first use."""
        if self._tokenizer is None:
            self._tokenizer = self.tokenizer_source.build(self.task)
        return self._tokenizer

    def prepare_data(self) -> None:
        """Fill the cache in one process of each machine, before the others look for it."""
        if self.cache_dir is not None and self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._encoded("train")
            self._encoded("validation")

    def train_dataloader(self) -> StepLoader:
        """Return shuffled training batches; the same for any number of workers."""
        data = self._encoded("train")
        if getattr(self.trainer, "overfit_batches", 0):  # Lightning wants the first ones, in order
            loader = StepLoader(data, batch_size=self.batch_size, collate_fn=self._collate)  # type: ignore[arg-type]
            loader.num_left_in_step = self._num_left_in_step
            return loader
        batches, num, length_of = self._training_batches(data)
        order = LengthGroupedBatches(
            num,
            self.batch_size,
            length_of,
            seed=self.seed,
            rank=self.trainer.global_rank if self.trainer is not None else 0,
            num_ranks=self.trainer.world_size if self.trainer is not None else 1,
        )
        loader = ResumableLoader(
            batches,
            sampler=order,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
        loader.num_left_in_step = self._num_left_in_step
        return loader

    def _training_batches(
        self, data: _Lazy | EncodedStore
    ) -> tuple[Dataset[ResponseBatch], int, Callable[[int], int] | None]:
        """Return batches by the numbers of their rows, how many rows there are, and what to sort them by."""
        if self.pack_length is None:
            return _Batches(data, self._collate), len(data), data.length if self.length_grouped else None
        lengths = [data.length(i) for i in range(len(data))]
        rows = pack_samples(lengths, self.pack_length, seed=self.seed)
        padding = 1 - sum(lengths) / (len(rows) * self.pack_length)
        rank_zero_info(f"train: {len(lengths)} samples packed in {len(rows)} rows, {padding:.1%} padding")
        return PackedBatches(data, rows, self._collate.keywords["pad_token_id"]), len(rows), None

    def _num_left_in_step(self, index: int) -> int:
        """Return how many batches are accumulated from a batch of the epoch on; the epoch's last step may be short."""
        if self.trainer is None:
            return 1
        num_accumulated = self.trainer.accumulate_grad_batches
        return int(min(num_accumulated - index % num_accumulated, max(self.trainer.num_training_batches - index, 1)))

    def val_dataloader(self) -> DataLoader[EncodedExample]:
        """Return validation batches, for the loss."""
        return self._in_order(self._encoded("validation"), self._collate)

    def test_dataloader(self) -> DataLoader[EncodedPrompt]:
        """Return the test split's prompts."""
        return self._in_order(self._test_prompts(), collate_prompts)

    def prompt_lengths(self) -> dict[str, int]:
        """Return the number of tokens of each prompt of the test split by its example's id."""
        prompts = self._test_prompts()
        return {(prompt := prompts[i]).example.id: len(prompt.prompt_ids) for i in range(len(prompts))}

    def _test_prompts(self) -> _Prompts:
        examples = self.task.examples("test")
        if self.max_eval_prompts is not None:
            examples = [examples[i] for i in range(min(self.max_eval_prompts, len(examples)))]
        return _Prompts(examples, self.built_tokenizer, self.prompt_template)

    def predict_dataloader(self) -> DataLoader[EncodedPrompt]:
        """Return the test split's prompts."""
        return self.test_dataloader()

    def sample_prompts(self, count: int) -> PromptBatch:
        """Return the first prompts of the validation split, to look at."""
        examples = self.task.examples("validation")
        prompts = _Prompts(examples, self.built_tokenizer, self.prompt_template)
        return collate_prompts([prompts[i] for i in range(min(count, len(prompts)))])

    def _in_order(self, data: Dataset[Any], collate: Callable[[list[Any]], Any]) -> DataLoader[Any]:
        """Return batches of all samples in order; processes share them without repeating any."""
        num_ranks = self.trainer.world_size if self.trainer is not None else 1
        if num_ranks == 1 or getattr(self.trainer, "overfit_batches", 0):
            return DataLoader(data, batch_size=self.eval_batch_size, num_workers=self.num_workers, collate_fn=collate)
        assert self.trainer is not None
        share = EvaluationBatches(
            len(data),  # type: ignore[arg-type] - all of ours have a length
            self.eval_batch_size,
            rank=self.trainer.global_rank,
            num_ranks=num_ranks,
        )
        return DataLoader(_Batches(data, collate), sampler=share, batch_size=None, num_workers=self.num_workers)

    @property
    def _collate(self) -> partial[ResponseBatch]:
        return partial(collate_responses, pad_token_id=int(self.built_tokenizer.pad_token_id))  # type: ignore[arg-type]

    @property
    def _encode(self) -> _Encode:
        return partial(encode_example, self.built_tokenizer, prompt_template=self.prompt_template)

    def _encoded(self, split: Split) -> _Lazy | EncodedStore:
        if split not in self._splits:
            examples = self.task.examples(split)
            if len(examples) == 0:
                raise ValueError(f"data.task: expected examples in the {split} split, got none; give it some.")
            is_generated = not isinstance(examples, list)
            # Generated splits can be too large to encode beforehand, and their lengths are bounded by their options.
            if is_generated and len(examples) > _LAZY_ABOVE and self.pack_length is None:
                self._splits[split] = _Lazy(examples, self._encode, self.max_length)
            else:
                cache_dir = None if is_generated else self.cache_dir
                self._splits[split] = self._stored(split, examples, cache_dir)
        return self._splits[split]

    def _stored(self, split: Split, examples: Sequence[Example], cache_dir: Path | None) -> EncodedStore:
        store = self._cached(examples, cache_dir) if cache_dir is not None else self._encode_all(examples)
        num_unread = getattr(self.task, "num_malformed", {}).get(split, 0)
        num_malformed = store.num_malformed + num_unread
        self.num_too_long += store.num_too_long
        self.num_malformed += num_malformed
        if store.num_too_long or num_malformed:
            rank_zero_info(
                f"{split}: {store.num_too_long} of {len(examples) + num_unread} samples dropped as longer than "
                f"{self.max_length} tokens, {num_malformed} skipped as malformed"
            )
        if len(store) == 0:
            raise ValueError(
                f"data.max_length: expected at least one {split} sample of at most {self.max_length} tokens, "
                f"got none; raise it."
            )
        return store

    def _encode_all(self, examples: Sequence[Example]) -> EncodedStore:
        skip_malformed = self.malformed == "skip"
        return encode_all(examples, self._encode, max_length=self.max_length, skip_malformed=skip_malformed)

    def _cached(self, examples: Sequence[Example], cache_dir: Path) -> EncodedStore:
        files = tokenizer_files(self.built_tokenizer)
        settings = (tokenizers.__version__, files, self.prompt_template, self.max_length, self.malformed)
        directory = cache_dir / store_key(examples, settings)
        try:
            return EncodedStore.load(directory)
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
            rmtree(directory, ignore_errors=True)
            store = self._encode_all(examples)
            store.save(directory)
            return store
