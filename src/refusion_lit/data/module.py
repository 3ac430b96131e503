"""The data module: a task and a tokenizer become batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.collate import (
    EncodedExample,
    EncodedPrompt,
    collate_prompts,
    collate_responses,
)
from refusion_lit.data.encoding import encode_example, encode_prompt
from refusion_lit.data.sampler import LengthGroupedBatches
from refusion_lit.data.tokenizers import TokenizerSource
from refusion_lit.tasks.base import Split, Task
from refusion_lit.types import Example, PromptBatch, ResponseBatch

_EAGER_LIMIT = 20_000
"""Splits up to this size are encoded once and kept; larger ones are encoded as they are drawn."""


class _Examples(Dataset[EncodedExample]):
    """Encoded examples, made when they are asked for."""

    def __init__(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self.examples, self._tokenizer, self._template = examples, tokenizer, template

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> EncodedExample:
        example = self.examples[index]
        prompt, response = encode_example(self._tokenizer, example, self._template)
        return EncodedExample(example.id, prompt, response)

    def length(self, index: int) -> int:
        """Return a length that grows with the number of tokens, without encoding."""
        example = self.examples[index]
        return len(example.query) + len(example.response)


class _Kept(Dataset[EncodedExample]):
    """Encoded examples that were kept."""

    def __init__(self, samples: list[EncodedExample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> EncodedExample:
        return self._samples[index]

    def length(self, index: int) -> int:
        """Return the number of tokens."""
        return len(self._samples[index])


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
        batch_size: Training samples a batch, on each process.
        eval_batch_size: Samples a batch in validation, and prompts a batch in test and prediction.
        max_length: Samples of more tokens (prompt and response) are dropped and counted.
        prompt_template: How a query becomes a prompt where the tokenizer has no chat template.
        length_grouped: Batch samples of similar lengths, which saves padding.
        malformed: What to do with a sample that cannot be encoded: stop with an ``error``, or ``skip`` and count it.
        num_workers: Processes that encode batches. Changes no batch.
        seed: Seeds the order of the training samples.
        max_eval_prompts: Decode only the first so many prompts in test and prediction; ``None`` for all.
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
        malformed: Literal["error", "skip"] = "error",
        num_workers: int = 0,
        seed: int = 0,
        max_eval_prompts: int | None = None,
    ) -> None:
        super().__init__()
        for option, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise ValueError(f"data.{option}: expected an integer of at least 1, got {value}; set it to 1 or more.")
        if "{query}" not in prompt_template:
            raise ValueError(f"data.prompt_template: expected a text with {{query}} in it, got {prompt_template!r}.")
        self.task = task
        self.tokenizer_source = tokenizer
        self.batch_size, self.eval_batch_size, self.max_length = batch_size, eval_batch_size, max_length
        self.prompt_template, self.length_grouped, self.malformed = prompt_template, length_grouped, malformed
        self.num_workers, self.seed, self.max_eval_prompts = num_workers, seed, max_eval_prompts
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._splits: dict[Split, _Examples | _Kept] = {}
        self.num_too_long = 0
        self.num_malformed = 0

    @property
    def built_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, made at the first use."""
        if self._tokenizer is None:
            self._tokenizer = self.tokenizer_source.build(self.task)
        return self._tokenizer

    def train_dataloader(self) -> DataLoader[EncodedExample]:
        """Return shuffled training batches; the same for any number of workers."""
        data = self._encoded("train")
        ranks, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        batches = LengthGroupedBatches(
            len(data),
            self.batch_size,
            data.length if self.length_grouped else None,
            seed=self.seed,
            rank=rank,
            num_ranks=ranks,
        )
        return DataLoader(
            data,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=self._collate,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[EncodedExample]:
        """Return validation batches, for the loss."""
        return DataLoader(
            self._encoded("validation"),
            batch_size=self.eval_batch_size,
            num_workers=self.num_workers,
            collate_fn=self._collate,
        )

    def test_dataloader(self) -> DataLoader[EncodedPrompt]:
        """Return the test split's prompts."""
        examples = self.task.examples("test")
        if self.max_eval_prompts is not None:
            examples = [examples[i] for i in range(min(self.max_eval_prompts, len(examples)))]
        data = _Prompts(examples, self.built_tokenizer, self.prompt_template)
        return DataLoader(
            data, batch_size=self.eval_batch_size, num_workers=self.num_workers, collate_fn=collate_prompts
        )

    def predict_dataloader(self) -> DataLoader[EncodedPrompt]:
        """Return the test split's prompts."""
        return self.test_dataloader()

    def sample_prompts(self, count: int) -> PromptBatch:
        """Return the first prompts of the validation split, to look at."""
        examples = self.task.examples("validation")
        prompts = _Prompts(examples, self.built_tokenizer, self.prompt_template)
        return collate_prompts([prompts[i] for i in range(min(count, len(prompts)))])

    @property
    def _collate(self) -> partial[ResponseBatch]:
        return partial(collate_responses, pad_token_id=int(self.built_tokenizer.pad_token_id))  # type: ignore[arg-type]

    def _encoded(self, split: Split) -> _Examples | _Kept:
        if split not in self._splits:
            examples = self.task.examples(split)
            if len(examples) == 0:
                raise ValueError(f"data.task: expected examples in the {split} split, got none; give it some.")
            lazy = _Examples(examples, self.built_tokenizer, self.prompt_template)
            # Generated tasks are too large to encode beforehand, and their lengths are bounded by their options.
            self._splits[split] = lazy if len(lazy) > _EAGER_LIMIT else self._keep(lazy, split)
        return self._splits[split]

    def _keep(self, lazy: _Examples, split: Split) -> _Kept:
        kept: list[EncodedExample] = []
        too_long = malformed = 0
        for index in range(len(lazy)):
            try:
                sample = lazy[index]
            except ValueError:
                if self.malformed == "error":
                    raise
                malformed += 1
                continue
            if len(sample) > self.max_length:
                too_long += 1
                continue
            kept.append(sample)
        self.num_too_long += too_long
        self.num_malformed += malformed
        if too_long or malformed:
            rank_zero_info(
                f"{split}: {too_long} of {len(lazy)} samples dropped as longer than {self.max_length} tokens, "
                f"{malformed} skipped as malformed"
            )
        if not kept:
            raise ValueError(
                f"data.max_length: expected at least one {split} sample of at most {self.max_length} tokens, "
                f"got none; raise it."
            )
        return _Kept(kept)
