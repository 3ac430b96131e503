"""The data module, which turns a task and a tokenizer into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.batches import (
    BatchDataset,
    LengthGroupedBatches,
    TrainingLoader,
    collate_packed,
    collate_responses,
)
from refusion_lit.data.conversations import end_of_turn
from refusion_lit.data.datasets import LazyDataset, pack_rows
from refusion_lit.data.evaluation import PromptBatch, encode_prompts, evaluation_loader
from refusion_lit.data.examples import EncodedExample, encode_example, load_examples
from refusion_lit.data.fingerprint import SplitSamples
from refusion_lit.data.tokenizers import PretrainedTokenizer, TokenizerSource
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.modeling.chat_template import set_chat_options
from refusion_lit.modeling.vocabulary import AddBos, add_eos_tokens, describe_bos, set_add_bos
from refusion_lit.tasks.base import Example, Split, Task
from refusion_lit.tasks.files import InstructionFiles
from refusion_lit.types import Prompt
from refusion_lit.utils.require import require, require_at_least, require_template

_LAZY_ABOVE = 20_000
"""Generated splits with more examples are encoded on access; all other splits once, before training."""


class InstructionDataModule(L.LightningDataModule):
    """Instruction data for training and decoding.

    Args:
        task: Provides the examples and scores responses. In Python also a data set of mappings (Hugging Face's, torch's
            or a list), or a mapping from split to data set; see ``InstructionFiles.from_rows``.
        tokenizer: Provides the tokenizer; in Python also a directory or hub id. Commands with a ``ckpt_path`` use the
            model's tokenizer instead.
        batch_size: Training samples per batch and process; with ``pack_length``, rows.
        eval_batch_size: Samples per validation batch, and prompts per batch in test and prediction.
        max_length: Samples with more tokens (prompt and response) are dropped and counted. In a generated split that is
            encoded on access, a longer sample is an error.
        prompt_template: Turns a query into a prompt if the tokenizer has no chat template. ``None``: the model's
            template in commands with a ``ckpt_path``, else ``{query}``.
        pack_length: Pack training samples into rows with at most this many tokens, at least ``max_length``. Samples do
            not see each other, and no loss changes. An objective that lengthens its sequences lengthens the rows.
            Attention over a row takes an explicit mask: rows much longer than the samples cost time with 'sdpa' and
            little with 'flex_attention'. ``None``: a row per sample.
        num_workers: Number of worker processes that collate batches. Changes no batch.
        seed: Seeds the training samples' order.
        max_eval_prompts: Decode only the first prompts in test and prediction; ``None`` for all.
        add_bos: Whether prompts begin with the BOS token: true, false, or ``auto``, as the tokenizer itself does. The
            choice is stored with the model. ``None``: the stored choice, else ``auto``.
        chat_template_kwargs: Chat template options, such as ``enable_thinking: false``; stored with the model.
            ``None``: the stored options, else none.
        show_samples: Number of training samples to print when a training begins, as the model sees them.

    >>> from refusion_lit.data.tokenizers import CharacterTokenizer
    >>> from refusion_lit.tasks import Additions
    >>> data = InstructionDataModule(Additions(num_train=8), CharacterTokenizer(), batch_size=4)
    >>> batch = next(iter(data.train_dataloader())).batch
    >>> data.built_tokenizer.decode(batch.input_ids[0, : batch.prompt_lengths[0]])[-1]
    '>'
    """

    def __init__(
        self,
        task: Task,
        tokenizer: TokenizerSource | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 128,
        max_length: int = 512,
        prompt_template: str | None = None,
        pack_length: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        max_eval_prompts: int | None = None,
        add_bos: AddBos | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        show_samples: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "eval_batch_size": eval_batch_size, "max_length": max_length}
        if max_eval_prompts is not None:
            sizes["max_eval_prompts"] = max_eval_prompts
        for option, value in sizes.items():
            require_at_least(f"data.{option}", value, 1)
        require_at_least("data.show_samples", show_samples, 0)
        fits = pack_length is None or pack_length >= max_length
        expected = f"at least max_length, which is {max_length}"
        fix = "raise it, lower max_length, or set it to null"
        require(fits, "data.pack_length", expected, pack_length, fix)
        if tokenizer is None:
            raise ValueError(
                "data.tokenizer: expected a value, got none; set it, or use a config that sets it, such as "
                "`--config configs/quickstart.yaml` (test, predict and validate can take it from --ckpt_path)."
            )
        self.task = _as_task(task)
        self.tokenizer_source = _as_tokenizer_source(tokenizer)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.max_length = max_length
        is_given = prompt_template is not None
        self.prompt_template = require_template(prompt_template, "data.prompt_template") if is_given else "{query}"
        self.pack_length = pack_length
        self.num_workers = num_workers
        self.seed = seed
        self.max_eval_prompts = max_eval_prompts
        self.add_bos: AddBos | None = add_bos
        self.chat_template_kwargs = chat_template_kwargs
        self.show_samples = show_samples
        self._splits: dict[Split, LazyDataset | list[EncodedExample]] = {}
        self._fingerprinted: dict[Split, SplitSamples] = {}
        self._prompts: list[tuple[Prompt, Example]] = []

    @cached_property
    def built_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, built on first use."""
        tokenizer = self.tokenizer_source.build(self.task, self.prompt_template)
        if self.add_bos is not None:
            set_add_bos(tokenizer, self.add_bos)
        if self.chat_template_kwargs is not None:
            set_chat_options(tokenizer, self.chat_template_kwargs)
        end = end_of_turn(tokenizer)  # the end of training examples
        if end is not None:
            add_eos_tokens(tokenizer, [end])
        if description := describe_bos(tokenizer):
            rank_zero_info(description)
        return tokenizer

    def check_context(self, max_positions: int) -> None:
        """Refuse training and validation samples that are longer than the model's context.

        Args:
            max_positions: Context length in tokens.

        Raises:
            ValueError: If a sample is too long. In a split that is encoded on access, the error comes when the sample
                is read.
        """
        for split in self._fitted_splits:
            samples = self._load_split(split)
            if isinstance(samples, LazyDataset):
                samples.max_length = min(self.max_length, max_positions)
                continue
            longest = max(map(len, samples))
            expected = f"samples of at most {max_positions} tokens, the model's context (max_position_embeddings)"
            fix = f"set it to {max_positions}, which drops longer samples, or take a model with a longer context"
            require(longest <= max_positions, "data.max_length", expected, longest, fix)

    def describe(self) -> str:
        """Describe the training data's size in a line, and ``show_samples`` samples as the model sees them."""
        parts = []
        for split in self._fitted_splits:
            samples = self._load_split(split)
            name = "training" if split == "train" else split
            if isinstance(samples, LazyDataset):
                parts.append(f"{len(samples)} {name} samples, encoded while they are read")
                continue
            num_answers = sum(len(sample.response_ids) for sample in samples)
            size = (
                f"{sum(map(len, samples))} tokens, {num_answers} of them in responses; longest {max(map(len, samples))}"
            )
            parts.append(f"{len(samples)} {name} samples ({size})")
        text = f"data: {', '.join(parts)}"
        trainer = self.trainer
        if trainer is not None and trainer.max_steps > 0 and self.pack_length is None:
            per_step = self.batch_size * trainer.accumulate_grad_batches * trainer.world_size
            num_epochs = trainer.max_steps * per_step / len(self._load_split("train"))
            text += f"; {trainer.max_steps} steps of {per_step} are {num_epochs:.3g} epochs"
        if num_turns := getattr(self.task, "num_context_turns", {}).get("train", 0):
            text += f"; {num_turns} assistant turns with tool calls or reasoning are context alone, and are trained "
            text += "with data.task.assistant_parts: all"
        samples = self._load_split("train")
        for sample in (samples[index] for index in range(min(self.show_samples, len(samples)))):
            prompt, response = map(self.built_tokenizer.decode, (list(sample.prompt_ids), list(sample.response_ids)))
            text += f"\nsample {sample.id}: prompt {prompt!r}, response {response!r}"
        return text

    def warn_of_shared_samples(self) -> None:
        """Warn if validation samples from files are training samples, too."""
        splits = [self._load_split(split) for split in self._fitted_splits]
        if not isinstance(self.task, InstructionFiles) or len(splits) < 2:
            return
        trained, validated = ([(*sample.prompt_ids, -1, *sample.response_ids) for sample in split] for split in splits)
        known = {*trained}
        num_shared = sum(sample in known for sample in validated)
        if num_shared:
            rank_zero_warn(
                f"data.task.validation: {num_shared} of {len(validated)} samples are training samples, too: val/loss "
                "and early stopping say little about new texts. Give other files, or set "
                "data.task.validation_fraction."
            )

    def train_dataloader(self) -> TrainingLoader:
        """Return a loader for shuffled micro-batches; the batches do not depend on ``num_workers``."""
        data = self._load_split("train")
        if getattr(self.trainer, "overfit_batches", 0):  # Lightning wants the first samples, in order
            loader = TrainingLoader(data, batch_size=self.batch_size, collate_fn=self._collate)  # type: ignore[arg-type]
        else:
            share = {"rank": self.trainer.global_rank, "num_ranks": self.trainer.world_size} if self.trainer else {}
            samples: Any = data
            collate = self._collate
            get_length = data.length if isinstance(data, LazyDataset) else lambda index: len(data[index])
            if self.pack_length is not None:
                assert not isinstance(data, LazyDataset), "samples are encoded beforehand where they are packed"
                samples, get_length = pack_rows(data, self.pack_length, seed=self.seed), None
                collate = partial(collate_packed, **self._collate.keywords)
            order = LengthGroupedBatches(
                len(samples), self.batch_size, get_length, seed=self.seed, pack_length=self.pack_length, **share
            )
            workers: dict[str, Any] = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
            loader = TrainingLoader(BatchDataset(samples, collate), sampler=order, batch_size=None, **workers)
        loader.trainer = self.trainer
        loader.split = self._split_samples("train")
        return loader

    def val_dataloader(self) -> DataLoader[EncodedExample]:
        """Return a loader for validation batches, for the loss."""
        samples = self._load_split("validation")
        return evaluation_loader(samples, self._collate, self.eval_batch_size, self.num_workers, self.trainer)

    def test_dataloader(self) -> DataLoader[tuple[Prompt, Example]]:
        """Return a loader for the test split's prompts."""
        prompts = self.test_prompts()
        return evaluation_loader(prompts, PromptBatch, self.eval_batch_size, self.num_workers, self.trainer)

    predict_dataloader = test_dataloader

    def test_prompts(self) -> list[tuple[Prompt, Example]]:
        """Return the test split's prompts with their examples; see :func:`encode_prompts`."""
        if not self._prompts:
            tokenizer = self.built_tokenizer
            self._prompts = encode_prompts(self.task, tokenizer, self.prompt_template, self.max_eval_prompts)
        return self._prompts

    def state_dict(self) -> dict[str, Any]:
        """Return the validation samples' fingerprint; the training loader stores the training samples' fingerprint."""
        if not self._validates:
            return {}
        return {"validation": self._split_samples("validation").fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warn if a resumed training has other validation samples than the training before it.

        Args:
            state_dict: What :meth:`state_dict` returned.
        """
        is_resumed = self.trainer is not None and self.trainer.state.fn == "fit"
        if not is_resumed or not self._validates or "validation" not in state_dict:
            return
        split = self._split_samples("validation")
        if change := split.describe_change(state_dict["validation"]):
            rank_zero_warn(
                f"{split.option}: {change}: the choice of the best checkpoint and early stopping compare the "
                "validation losses of different samples."
            )

    def training_prompt(self) -> Prompt:
        """Return the longest training prompt, or the first if the split is encoded on access."""
        samples = self._load_split("train")
        is_lazy = isinstance(samples, LazyDataset)
        sample = samples[0] if is_lazy else max(samples, key=lambda sample: len(sample.prompt_ids))
        return Prompt(token_ids=tuple(sample.prompt_ids), id=sample.id)

    def longest_response(self) -> int | None:
        """Return the longest training response's length; ``None`` for a split that is encoded on access."""
        samples = self._load_split("train")
        if isinstance(samples, LazyDataset):
            return None
        return max(len(sample.response_ids) for sample in samples)

    @property
    def _validates(self) -> bool:
        return self.trainer is None or self.trainer.limit_val_batches > 0

    @property
    def _fitted_splits(self) -> list[Split]:
        """The splits that a training reads."""
        return ["train", "validation"] if self._validates else ["train"]

    def _split_samples(self, split: Split) -> SplitSamples:
        """Return a split's samples with their fingerprint, and the option that names their source."""
        if split not in self._fingerprinted:
            option, source = "data.task", type(self.task).__name__
            if isinstance(self.task, InstructionFiles):
                option, source = self.task.describe_source(split)
            self._fingerprinted[split] = SplitSamples(self._load_split(split), option, source)
        return self._fingerprinted[split]

    @property
    def _collate(self) -> partial[ResponseBatch]:
        return partial(collate_responses, pad_token_id=int(self.built_tokenizer.pad_token_id))  # type: ignore[arg-type]

    def _load_split(self, split: Split) -> LazyDataset | list[EncodedExample]:
        """Return a split's encoded examples; the first call loads them.

        Raises:
            ValueError: If the split is empty or an example is malformed.
        """
        if split not in self._splits:
            examples = load_examples(self.task, split)
            num_examples = len(examples)
            change = "lower" if split == "train" else "raise"
            fix = f"add samples that differ from the others, or {change} the validation_fraction of InstructionFiles"
            require(num_examples > 0, "data.task", f"examples in the {split} split", num_examples, fix)
            is_generated = not isinstance(examples, list)
            # Generated splits can be too large to encode in advance, and their lengths are bounded by their options.
            if is_generated and num_examples > _LAZY_ABOVE and self.pack_length is None:
                encode = partial(encode_example, self.built_tokenizer, prompt_template=self.prompt_template)
                self._splits[split] = LazyDataset(examples, encode, self.max_length)
            else:
                self._splits[split] = self._encode_all(split, examples)
        return self._splits[split]

    def _encode_all(self, split: Split, examples: Sequence[Example]) -> list[EncodedExample]:
        """Encode a split; drop and count samples that are too long or, if the task allows it, malformed."""
        samples: list[EncodedExample] = []
        num_too_long = 0
        num_unread = getattr(self.task, "num_malformed", {}).get(split, 0)  # rows that the task has left out
        num_malformed = num_unread
        for example in examples:
            try:
                sample = encode_example(self.built_tokenizer, example, self.prompt_template)
            except ValueError:
                if getattr(self.task, "malformed", "error") == "error":
                    raise
                num_malformed += 1
                continue
            if len(sample) > self.max_length:
                num_too_long += 1
            else:
                samples.append(sample)
        num_left_out = getattr(self.task, "num_left_out", {}).get(split, 0)
        if num_too_long or num_malformed or num_left_out:
            rank_zero_info(
                f"{split}: {num_too_long} of {len(examples) + num_unread} samples dropped as longer than "
                f"{self.max_length} tokens, {num_malformed} skipped as malformed, "
                f"{num_left_out} left out by data.task.keep"
            )
        expected = f"at least one {split} sample of at most {self.max_length} tokens"
        require(len(samples) > 0, "data.max_length", expected, len(samples), "raise it")
        return samples


def _as_task(task: Any) -> Task:  # noqa: ANN401 - Python users pass data sets of many libraries
    """Return a task unchanged; wrap a data set in memory in a task.

    Raises:
        ValueError: If the value is neither.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, Mapping) and "train" in task:
        return InstructionFiles.from_rows(task["train"], validation=task.get("validation"), test=task.get("test"))
    is_data_set = (hasattr(task, "__len__") and hasattr(task, "__getitem__")) or hasattr(task, "__iter__")
    expected = "a task such as InstructionFiles(train=...), or a data set of mappings"
    fix = "pass InstructionFiles(train=FILE), or a list of dicts"
    require(is_data_set and not isinstance(task, str | bytes | Mapping), "data.task", expected, task, fix)
    return InstructionFiles.from_rows(task)


def _as_tokenizer_source(source: Any) -> TokenizerSource:  # noqa: ANN401 - Python users pass names
    """Return a tokenizer source unchanged; turn a directory or hub id into a tokenizer source.

    Raises:
        ValueError: If the value is neither.
    """
    if isinstance(source, str | Path):
        return PretrainedTokenizer(source=str(source))
    expected = "a tokenizer source such as CharacterTokenizer() or PretrainedTokenizer(source=DIRECTORY or hub id)"
    fix = "pass PretrainedTokenizer(source=...)"
    require(isinstance(source, TokenizerSource), "data.tokenizer", expected, type(source).__name__, fix)
    return source
