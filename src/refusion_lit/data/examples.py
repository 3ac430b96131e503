"""Encoded examples: kept, or encoded when they are read, and collated into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.types import Example
from refusion_lit.utils.keys import stable_key
from refusion_lit.utils.require import require

Encode = Callable[[Example], tuple[list[int], list[int]]]
"""Returns an example's prompt and response as token ids; raises a ``ValueError`` for a malformed example."""


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An example as token ids."""

    id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


class EncodedOnRead(Dataset[EncodedExample]):
    """A dataset that generates and encodes each example when it is read.

    Args:
        examples: The examples of a generated task.
        encode: Encodes an example.
        max_length: Maximum number of tokens of an example; a longer one raises a ``ValueError`` when it is read.
    """

    def __init__(self, examples: Sequence[Example], encode: Encode, max_length: int) -> None:
        self._examples = examples
        self._encode = encode
        self.max_length = max_length

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    def __getitem__(self, index: int) -> EncodedExample:
        """Return an encoded example."""
        example = self._examples[index]
        sample = EncodedExample(example.id, *self._encode(example))
        expected = f"at most {self.max_length} tokens in the sample {example.id}"
        fix = "raise it, or make the task's examples shorter"
        require(len(sample) <= self.max_length, "data.max_length", expected, len(sample), fix)
        return sample

    def length(self, index: int) -> int:
        """Return a number that grows with the example's tokens, without encoding it."""
        example = self._examples[index]
        return len(example.query) + len(example.response)


class BatchDataset(Dataset[Any]):
    """Maps a list of sample indices to the batch of these samples.

    Args:
        samples: A dataset of samples.
        collate: Collates samples into a batch.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any]) -> None:  # noqa: ANN401 - examples or prompts
        self._samples = samples
        self._collate = collate

    def __getitem__(self, index: list[int]) -> Any:  # noqa: ANN401
        """Return a batch."""
        return self._collate([self._samples[i] for i in index])


def collate_responses(
    samples: Sequence[EncodedExample], pad_token_id: int, *, rows: Sequence[int] | None = None
) -> ResponseBatch:
    """Pad examples on the right to the longest of them; no examples give an empty batch.

    Args:
        samples: The examples.
        pad_token_id: The padding token.
        rows: For packing: row that each sample goes to.
    """
    width = max((len(sample) for sample in samples), default=0)
    padded = [[*s.prompt_ids, *s.response_ids, *[pad_token_id] * (width - len(s))] for s in samples]
    return ResponseBatch(
        input_ids=torch.tensor(padded, dtype=torch.long).reshape(len(padded), width),
        prompt_lengths=torch.tensor([len(sample.prompt_ids) for sample in samples], dtype=torch.long),
        response_lengths=torch.tensor([len(sample.response_ids) for sample in samples], dtype=torch.long),
        sample_keys=torch.tensor([stable_key(sample.id) for sample in samples], dtype=torch.long),
        ids=[sample.id for sample in samples],
        rows=None if rows is None else torch.tensor(rows),
    )
