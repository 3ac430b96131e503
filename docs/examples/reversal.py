"""A task: write a word backwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from refusion_lit.tasks import SPLITS, Split, Task
from refusion_lit.types import Example


@dataclass(frozen=True, kw_only=True)
class Reversal(Task):
    """Words of random letters.

    Attributes:
        num_letters: Letters of a word.
        num_examples: Examples of each split.
    """

    num_letters: int = 8
    num_examples: int = 1000

    def examples(self, split: Split) -> Sequence[Example]:
        """Return words and their reversals; a word's last letter tells its split, so that splits never overlap."""
        random = Random(split)
        examples = []
        for index in range(self.num_examples):
            word = "".join(random.choices("abcdefgh", k=self.num_letters)) + "xyz"[SPLITS.index(split)]
            examples.append(Example(id=f"{split}-{index}", query=word + ">", response=word[::-1]))
        return examples

    def score(self, example: Example, response: str) -> float:
        """Return 1 for exactly the reversed word, else 0."""
        return float(response == example.response)

    def characters(self) -> str:
        """Return the letters and the arrow."""
        return "abcdefghxyz>"
