"""GSM8K: grade-school math problems with a numeric answer (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from refusion_lit.tasks.base import Example
from refusion_lit.tasks.files import InstructionFiles, Preset

_NUMBER = re.compile(
    r"(?P<sign>[-\N{MINUS SIGN}+]?)\s*\$?\s*(?P<digits>\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*(?P<denominator>\d+))?"
)
_BOX = re.compile(r"\\f?boxed\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_LATEX_LAYOUT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[,!;: ]|[{}]")


@dataclass(frozen=True, kw_only=True)
class Gsm8k(InstructionFiles):
    r"""Questions with worked solutions that end in ``#### number``, from files or the hub data set ``openai/gsm8k``.

    A response is correct if its final number equals the reference's. The final number follows the last ``####`` or
    stands in the last ``\boxed{...}``, whichever comes later. Commas, signs, currency, decimals, units and a final
    period are ignored. A response with neither marker is wrong, even if it contains the number. For files and splits
    see :class:`InstructionFiles`; for the hub data set use ``dataset: openai/gsm8k`` and ``dataset_name: main``.

    Examples:
        >>> task = Gsm8k(dataset="openai/gsm8k", dataset_name="main")
        >>> example = Example(id="0", query="6 eggs at $3?", response="6 * 3 = 18\n#### 18")
        >>> [task.score(example, text) for text in ("#### $18.00", r"so \boxed{18}", "18")]
        [1.0, 1.0, 0.0]
    """

    preset: Preset = "question_answer"

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response's final number equals the reference's, else 0.

        Raises:
            ValueError: If the reference has no final number.
        """
        expected = extract_answer(example.response)
        if expected is None:
            raise ValueError(
                f"example {example.id}: expected a reference with a number after ####, got "
                f"{example.response[-60:]!r}; end it with #### NUMBER."
            )
        return float(extract_answer(response) == expected)


def extract_answer(text: str) -> Fraction | None:
    """Return the final number of a solution; ``None`` if there is no marker or no number after it.

    >>> extract_answer("1,000 in total. #### 1,234.50")
    Fraction(2469, 2)
    """
    answers = [(match.end(), text[match.end() :].split("\n", 1)[0]) for match in re.finditer("####", text)]
    answers += [(match.end(), _until_closing_brace(text[match.end() :])) for match in _BOX.finditer(text)]
    return _first_number(max(answers)[1]) if answers else None


def _first_number(text: str) -> Fraction | None:
    """Return the exact value of the first number in a text; ``None`` without a number, or if it is too long."""
    text = " ".join(text.split())  # in long runs of white space, the search below takes cubic time
    text = _LATEX_LAYOUT.sub("", _FRACTION.sub(r"\1/\2", text.replace("\\$", "$")))
    match = _NUMBER.search(text)
    if match is None:
        return None
    try:
        value = Fraction(match["digits"].replace(",", "").rstrip(".")) / int(match["denominator"] or 1)
    except (ZeroDivisionError, ValueError):  # Python converts at most 4300 digits, which no reference has
        return None
    return -value if match["sign"] in ("-", "\N{MINUS SIGN}") else value


def _until_closing_brace(text: str) -> str:
    """Return the text up to the brace that closes a box; the text starts after the opening brace."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text
