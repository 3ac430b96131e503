"""Encoded examples: stored in flat arrays or encoded when they are read, and collated into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
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


@dataclass(frozen=True, kw_only=True)
class EncodedStore(Dataset[EncodedExample]):
    """Encoded examples, concatenated in flat arrays: four bytes per token.

    Attributes:
        tokens: All tokens; for each example the prompt, then the response.
        ends: End of each example in ``tokens``.
        prompt_lengths: Number of prompt tokens of each example.
        ids: The examples' ids.
        num_too_long: Number of examples that were dropped as too long.
        num_malformed: Number of examples that were skipped because they cannot be encoded.
    """

    tokens: Int[np.ndarray, " token"]
    ends: Int[np.ndarray, " example"]
    prompt_lengths: Int[np.ndarray, " example"]
    ids: list[str]
    num_too_long: int = 0
    num_malformed: int = 0

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.ids)

    def __getitem__(self, index: int) -> EncodedExample:
        """Return an example."""
        tokens = self.tokens[self._start(index) : int(self.ends[index])].tolist()
        num_prompt = int(self.prompt_lengths[index])
        return EncodedExample(self.ids[index], tokens[:num_prompt], tokens[num_prompt:])

    def length(self, index: int) -> int:
        """Return an example's number of tokens."""
        return int(self.ends[index]) - self._start(index)

    def _start(self, index: int) -> int:
        return int(self.ends[index - 1]) if index else 0


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


def encode_all(
    examples: Sequence[Example],
    encode: Encode,
    *,
    max_length: int,
    skip_malformed: bool,
) -> EncodedStore:
    """Encode examples into a store.

    Args:
        examples: The examples.
        encode: Encodes an example.
        max_length: Drop and count examples of more tokens.
        skip_malformed: Skip and count malformed examples instead of raising.

    Raises:
        ValueError: If an example is malformed and those are not skipped.
    """
    chunks: list[Int[np.ndarray, " token"]] = []
    lengths: list[int] = []
    prompt_lengths: list[int] = []
    ids: list[str] = []
    num_too_long = num_malformed = 0
    for example in examples:
        try:
            prompt, response = encode(example)
        except ValueError:
            if not skip_malformed:
                raise
            num_malformed += 1
            continue
        length = len(prompt) + len(response)
        if length > max_length:
            num_too_long += 1
            continue
        chunks.append(np.array(prompt + response, dtype=np.int32))
        lengths.append(length)
        prompt_lengths.append(len(prompt))
        ids.append(example.id)
    return EncodedStore(
        tokens=np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32),
        ends=np.cumsum(lengths, dtype=np.int64),
        prompt_lengths=np.array(prompt_lengths, dtype=np.int32),
        ids=ids,
        num_too_long=num_too_long,
        num_malformed=num_malformed,
    )


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
