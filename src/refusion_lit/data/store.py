"""A store of encoded examples in flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from torch.utils.data import Dataset

from refusion_lit.data.collate import EncodedExample
from refusion_lit.types import Example


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


def encode_all(
    examples: Sequence[Example],
    encode: Callable[[Example], tuple[list[int], list[int]]],
    *,
    max_length: int,
    skip_malformed: bool,
) -> EncodedStore:
    """Encode examples into a store.

    Args:
        examples: The examples.
        encode: Returns an example's prompt and response; raises a ``ValueError`` for a malformed one.
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
