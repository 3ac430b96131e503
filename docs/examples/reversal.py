"""A task: reverse a word."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from refusion_lit.tasks import SPLITS, Example, Split, Task


@dataclass(frozen=True, kw_only=True)
class Reversal(Task):
    """Words of random letters, to be reversed.

    Attributes:
        num_letters: Number of letters in a word.
        num_examples: Number of examples in each split.
    """

    num_letters: int = 8
    num_examples: int = 1000

    def examples(self, split: Split) -> Sequence[Example]:
        """Return words and their reversals. The last letter of a word names its split, so splits are disjoint."""
        random = Random(split)
        examples = []
        for index in range(self.num_examples):
            word = "".join(random.choices("abcdefgh", k=self.num_letters)) + "xyz"[SPLITS.index(split)]
            examples.append(Example(id=f"{split}-{index}", query=word + ">", response=word[::-1]))
        return examples

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response is exactly the reversed word, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return all characters of queries and responses, for a character tokenizer."""
        return "abcdefghxyz>"
