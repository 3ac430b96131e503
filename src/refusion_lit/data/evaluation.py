"""Evaluation prompts and batches: every sample exactly once, however many processes there are."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import PreTrainedTokenizerBase

from refusion_lit.data.batches import BatchDataset
from refusion_lit.data.conversations import encode_prompt
from refusion_lit.data.detokenizer import Detokenizer
from refusion_lit.data.encoding import encode_within
from refusion_lit.data.examples import encode_example, load_examples
from refusion_lit.tasks.base import Example, Task
from refusion_lit.types import Prompt
from refusion_lit.utils.require import require


def encode_prompts(
    task: Task, tokenizer: PreTrainedTokenizerBase, prompt_template: str, max_prompts: int | None
) -> list[tuple[Prompt, Example]]:
    """Encode a test split's prompts, with the given tokens of their responses.

    If an example has an ``answer``, its response becomes the rendered turn's text.

    Args:
        task: The task.
        tokenizer: The tokenizer.
        prompt_template: Turns a query into a prompt if the tokenizer has no chat template.
        max_prompts: Take only the first prompts; ``None`` for all.

    Raises:
        ValueError: If there are no examples, or two examples have the same id.
    """
    examples = list(itertools.islice(load_examples(task, "test"), max_prompts))
    require(len(examples) > 0, "data.task", "examples in the test split", 0, "give the task some to decode")
    [(name, count)] = Counter(example.id for example in examples).most_common(1)
    require(count == 1, "data.task", "examples with different ids", name, "rename one of them")
    prompts: list[tuple[Prompt, Example]] = []
    detokenize = Detokenizer(tokenizer)
    for example in examples:
        if example.answer is None:
            tools = example.meta.get("tools", ())
            ids = encode_prompt(tokenizer, example.query, prompt_template, example.messages, tools)
            given = encode_given(tokenizer, example)
        else:
            encoded = encode_example(tokenizer, example, prompt_template)
            ids, given = encoded.prompt_ids, ()
            example = replace(example, response=detokenize(encoded.response_ids, ids))
        prompts.append((Prompt(token_ids=tuple(ids), id=example.id, given=given), example))
    return prompts


def encode_given(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[int | None, ...]:
    """Return an example's response tokens, ``None`` in spans; empty without spans.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet, or the spans are not in text order.
    """
    if not example.spans:
        return ()
    bounds = [0, *itertools.chain.from_iterable(example.spans), len(example.response)]
    expected = f"character ranges in text order within its {len(example.response)} characters"
    name = f"example {example.id}: spans"
    require(bounds == sorted(bounds), name, expected, example.spans, "correct them in the task's examples")
    tokens: list[int | None] = []
    end = 0
    for start, stop in (*example.spans, (len(example.response),) * 2):
        tokens += encode_within(tokenizer, example.response[end:start])
        tokens += [None] * len(encode_within(tokenizer, example.response[start:stop]))
        end = stop
    return (*tokens, int(tokenizer.eos_token_id))  # type: ignore[arg-type]


class PromptBatch:
    """Prompts to decode and their examples, in the same order.

    Not a dataclass: Lightning copies dataclasses to move their tensors, and refuses frozen dataclasses.

    Args:
        samples: Prompts with their examples.
    """

    def __init__(self, samples: Sequence[tuple[Prompt, Example]]) -> None:
        self.prompts = [prompt for prompt, _ in samples]
        self.examples = [example for _, example in samples]


def evaluation_loader(
    samples: Any,  # noqa: ANN401 - examples or prompts
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    num_workers: int,
    trainer: L.Trainer | None,
) -> DataLoader[Any]:
    """Return a loader for all samples in order, divided among the trainer's processes without repetition."""
    if trainer is None or trainer.world_size == 1 or getattr(trainer, "overfit_batches", 0):
        return DataLoader(samples, batch_size=batch_size, num_workers=num_workers, collate_fn=collate)
    share = EvaluationBatches(len(samples), batch_size, rank=trainer.global_rank, num_ranks=trainer.world_size)
    return DataLoader(BatchDataset(samples, collate), sampler=share, batch_size=None, num_workers=num_workers)


class EvaluationBatches(DistributedSampler[list[int]]):
    """Gives every process a contiguous share of the samples, in batches, and repeats no sample.

    Shares joined by rank are all samples in order. All processes have equally many batches, because strategies that
    gather weights in every forward pass need it: an extra sample goes into its process's last batch. A process without
    samples has an empty batch: without batches, Lightning skips the epoch-end hooks, in which processes wait for each
    other.

    The sampler yields whole batches: a loader takes it as ``sampler`` with ``batch_size=None``. Lightning leaves a
    ``DistributedSampler`` in place, but replaces other samplers by a sampler that repeats samples.

    Args:
        num_samples: Dataset size.
        batch_size: Samples per batch and process.
        rank: Index of this process.
        num_ranks: Number of processes.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> None:
        super().__init__(range(max(num_samples, 1)), num_replicas=num_ranks, rank=rank)  # type: ignore[arg-type]
        share = np.array_split(np.arange(num_samples), num_ranks)[rank]
        num_batches = max(math.ceil(num_samples // num_ranks / batch_size), 1)  # of the process with the fewest samples
        ends = range(batch_size, batch_size * num_batches, batch_size)
        self._batches = [batch.tolist() for batch in np.split(share, ends)]

    def __len__(self) -> int:
        """Return the number of batches, the same on all processes."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)
