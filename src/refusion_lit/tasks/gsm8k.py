"""GSM8K: word problems whose answer is a number (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from refusion_lit.tasks.files import InstructionFiles
from refusion_lit.types import Example

_NUMBER = re.compile(
    r"(?P<sign>[-\N{MINUS SIGN}+]?)\s*\$?\s*(?P<digits>\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*(?P<below>\d+))?"
)
_BOX = re.compile(r"\\f?boxed\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_LAYOUT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[,!;: ]|[{}]")


@dataclass(frozen=True, kw_only=True)
class Gsm8k(InstructionFiles):
    r"""Questions with worked answers that end in ``#### number``, from files or the hub data set ``openai/gsm8k``.

    A response is right if its number is the reference's. Its number is the one behind the last ``####`` or in the last
    ``\boxed{...}``, whichever comes later; commas, signs, currency, decimals, units and a trailing period make no
    difference. A response with neither is wrong, also if it names the number somewhere. For files and splits see
    :class:`InstructionFiles`; for the hub: ``dataset: openai/gsm8k`` with ``dataset_name: main``.
    """

    preset: Literal["query_response", "question_answer", "instruction", "messages"] = "question_answer"

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response's number is the reference's, else 0.

        Raises:
            ValueError: If the reference has no number.
        """
        expected = answer(example.response)
        if expected is None:
            raise ValueError(
                f"example {example.id}: expected a reference with a number behind ####, got "
                f"{example.response[-60:]!r}; mend the data."
            )
        return float(answer(response) == expected)


def answer(text: str) -> Fraction | None:
    """Return the number that a text gives as its answer; ``None`` if it gives none."""
    found = [(match.end(), text[match.end() :].split("\n", 1)[0]) for match in re.finditer("####", text)]
    found += [(match.end(), _boxed(text[match.end() :])) for match in _BOX.finditer(text)]
    return number(max(found)[1]) if found else None


def number(text: str) -> Fraction | None:
    """Return the first number of a text, exactly; ``None`` if there is none."""
    text = _LAYOUT.sub("", _FRACTION.sub(r"\1/\2", text.replace("\\$", "$")))
    match = _NUMBER.search(text)
    if match is None:
        return None
    value = Fraction(match["digits"].replace(",", "").rstrip("."))
    if match["below"]:
        if int(match["below"]) == 0:
            return None
        value /= int(match["below"])
    return -value if match["sign"] in ("-", "\N{MINUS SIGN}") else value


def _boxed(text: str) -> str:
    """Return what stands before the brace that closes a box."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return text
