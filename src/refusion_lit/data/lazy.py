"""Examples of large generated tasks, generated and encoded when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.utils.data import Dataset

from refusion_lit.data.collate import EncodedExample
from refusion_lit.types import Example
from refusion_lit.utils.require import require


class LazyExamples(Dataset[EncodedExample]):
    """A dataset that generates and encodes each example when it is read.

    Args:
        examples: The examples of a generated task.
        encode: Returns an example's prompt and response.
        max_length: Maximum number of tokens of an example; a longer one raises a ``ValueError`` when it is read.
    """

    def __init__(
        self, examples: Sequence[Example], encode: Callable[[Example], tuple[list[int], list[int]]], max_length: int
    ) -> None:
        self._examples, self._encode, self.max_length = examples, encode, max_length

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
