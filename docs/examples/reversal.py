"""A task: reverse a word."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from zlib import crc32

from refusion_lit.tasks import Example, Split, Task


@dataclass(frozen=True, kw_only=True)
class Reversal(Task):
    """Words of random letters, to be reversed.

    Attributes:
        num_letters: Number of letters in a word.
        num_examples: Number of training examples; validation and test have a twentieth of it.
    """

    num_letters: int = 8
    num_examples: int = 20_000

    def examples(self, split: Split) -> Sequence[Example]:
        """Return words and their reversals. A hash of the word chooses its split, so splits are disjoint."""
        random = Random(split)
        examples = []
        while len(examples) < (self.num_examples if split == "train" else self.num_examples // 20):
            word = "".join(random.choices("abcdefgh", k=self.num_letters))
            if {0: "validation", 1: "test"}.get(crc32(word.encode()) % 10, "train") == split:
                examples.append(Example(id=f"{split}-{len(examples)}", query=word + ">", response=word[::-1]))
        return examples

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response is exactly the reversed word, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return all characters of queries and responses, for a character tokenizer."""
        return "abcdefgh>"
