"""GSM8K: grade-school math problems with a numeric answer (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from unicodedata import normalize

from refusion_lit.tasks.base import Example
from refusion_lit.tasks.files import InstructionFiles, Preset

_NUMBER = re.compile(
    r"(?P<sign>[-\N{MINUS SIGN}+]?)\s*\$?\s*"
    r"(?:(?P<whole>\d{1,3}(?: \d{3})+|\d[\d,]*)(?: and | )(?=(?!0)\d\d?\s*/\s*\d))?"  # 2 1/2
    r"(?P<digits>\d{1,3}(?:[ _'\N{RIGHT SINGLE QUOTATION MARK}]\d{3})+(?!\d)(?:\.\d+)?|\d[\d,]*(?:\.\d+)?|\.\d+)"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})(?!\d)"
    r"|\s?(?:\\times|\\cdot|[x*\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}])\s?10"
    r"(?:\s?\^\s?|\*\*| \*\* )(?P<power>[-+]?\d{1,3})(?!\d)"
    r"|(?:\s?\^\s?|\*\*| \*\* )(?P<own_power>[-+]?\d{1,3})(?!\d))?"  # 10^3
    r"(?:\s*/\s*(?P<denominator>\d+))?"
)
_DASH_AS_MINUS = re.compile(r"[\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{EN DASH}\N{FULLWIDTH HYPHEN-MINUS}](?=[$.\d])")
_THOUSANDS = re.compile(r"[ _,'\N{RIGHT SINGLE QUOTATION MARK}]")
_POINTS_AS_THOUSANDS = re.compile(
    r"(?<![\d.,])(\d{1,3}(?:(?:\.\d{3})+(?=,\d)|(?:\.\d{3}){2,}))(?:,(\d+))?(?!\d)"
)  # 1.000,50
_EQUALS = re.compile(r"=|\N{ALMOST EQUAL TO}|\\approx")
_EQUATION_IN_PARENTHESES = re.compile(r"\([^()=]*=[^()]*\)")
_SUPERSCRIPTS = re.compile(r"(?<=\d)[\u207b\u00b9\u00b2\u00b3\u2070-\u2079]+")
_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")  # \frac{1}{2}, \frac12
_FRACTION_CHARACTER = re.compile("[\N{VULGAR FRACTION ONE QUARTER}-\N{VULGAR FRACTION THREE QUARTERS}\u2150-\u215e]")
_LATEX_LAYOUT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[,!;: ]|[{}]")
# The three below are the rules of lm-evaluation-harness, gsm8k.yaml (version 3).
_HARNESS_ENDS = re.compile(r"Question:|</s>|<\|im_end\|>")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Gsm8k(InstructionFiles):
    r"""Questions with worked solutions that end in ``#### number``, from files or the hub data set ``openai/gsm8k``.

    ``score`` is 1 if a response's final number equals the reference's. The final number follows the last ``####`` or
    stands in the last ``\boxed{...}``, whichever comes later. The final number of an equation is the result. Numbers
    are compared by value: commas, signs, currency, decimals, fractions, powers of ten, units and a final period are
    read or ignored. A response with neither marker is wrong, even if it contains the number. For files and splits see
    :class:`InstructionFiles`; for the hub data set use ``dataset: openai/gsm8k`` and ``dataset_name: main``.

    Two further scores equal lm-evaluation-harness's scores for the same response in its task ``gsm8k``:
    ``strict_match`` compares the text of the number after the first ``####``, and ``flexible_extract`` the text of the
    last number anywhere. The harness cuts responses at ``Question:``.

    Examples:
        >>> task = Gsm8k(dataset="openai/gsm8k", dataset_name="main")
        >>> example = Example(id="0", query="6 eggs at $3?", response="6 * 3 = 18\n#### 18")
        >>> task.score(example, "#### 18.00")
        {'score': 1.0, 'strict_match': 0.0, 'flexible_extract': 0.0}
        >>> task.score(example, "The answer is 18 dollars.")
        {'score': 0.0, 'strict_match': 0.0, 'flexible_extract': 1.0}
    """

    metrics = ("strict_match", "flexible_extract")
    preset: Preset = "question_answer"

    def score(self, example: Example, response: str) -> dict[str, float]:
        """Return the score and the harness's two scores, all of them 0 or 1.

        Raises:
            ValueError: If the reference has no final number.
        """
        expected = extract_answer(example.response)
        if expected is None:
            raise ValueError(
                f"example {example.id}: expected a reference with a number after ####, got "
                f"{example.response[-60:]!r}; end it with #### NUMBER."
            )
        score = float(extract_answer(response) == expected)
        return {"score": score, **_harness_scores(example.response, response)}


def extract_answer(text: str) -> Fraction | None:
    """Return the final number of a solution; ``None`` if there is no marker or no number after it.

    >>> extract_answer("1,000 in total. #### 1,234.50")
    Fraction(2469, 2)
    """
    answers = [(match.end(), text[match.end() :].split("\n", 1)[0]) for match in re.finditer("####", text)]
    answers += [(match.end(), _until_closing_brace(text[match.end() :])) for match in _BOX.finditer(text)]
    return _read_number(max(answers)[1]) if answers else None


def _read_number(text: str) -> Fraction | None:
    """Return the exact value of the first number or of an equation's result; ``None`` without a number.

    A number that is too long for Python to convert gives ``None``, too.
    """
    text = " ".join(text.split())  # in long runs of white space, the search below takes cubic time
    text = _DASH_AS_MINUS.sub("-", text)
    text = _POINTS_AS_THOUSANDS.sub(lambda match: f"{match[1].replace('.', '')}.{match[2] or 0}", text)
    text = _FRACTION_CHARACTER.sub(lambda match: " " + normalize("NFKC", match[0]).replace("\u2044", "/"), text)
    text = _SUPERSCRIPTS.sub(lambda match: "^" + normalize("NFKC", match[0]).replace("\N{MINUS SIGN}", "-"), text)
    text = _FRACTION.sub(r" \1\2/\3\4", text.replace("\\$", "$"))
    plain = _LATEX_LAYOUT.sub("", text)
    text = plain if _NUMBER.search(plain) else text  # the number may be within \text{...}
    without_remarks = _EQUATION_IN_PARENTHESES.sub("", text)  # 18 (as 20 - 2 = 18, and 3 = 3)
    sides = [side for version in (without_remarks, text) for side in reversed(_EQUALS.split(version))]
    match = next(filter(None, map(_NUMBER.search, sides)), None)
    if match is None:
        return None
    try:
        digits = _THOUSANDS.sub("", match["digits"])
        # A power of a longer number is longer than any reference, and slow.
        value = Fraction(digits) ** int(match["own_power"] or 1 if len(digits) < 10 else 1)
        value /= int(match["denominator"] or 1)
        value *= Fraction(10) ** int(match["exponent"] or match["power"] or 0)
        value += Fraction(_THOUSANDS.sub("", match["whole"] or "0"))
    except (ZeroDivisionError, ValueError):  # Python converts at most 4300 digits, which no reference has
        return None
    return -value if match["sign"] in ("-", "\N{MINUS SIGN}") else value


def _harness_scores(reference: str, response: str) -> dict[str, float]:
    """Return a response's scores in the task ``gsm8k`` of lm-evaluation-harness."""
    response = _HARNESS_ENDS.split(response, maxsplit=1)[0]
    strict, flexible = _STRICT.findall(response), _FLEXIBLE.findall(response)
    extracted = {"strict_match": strict[0] if strict else "", "flexible_extract": flexible[-1] if flexible else ""}
    expected = _harness_text(reference)
    return {name: float(bool(text) and _harness_text(text) == expected) for name, text in extracted.items()}


def _harness_text(text: str) -> str:
    """Return the text that lm-evaluation-harness compares: without commas, dollar signs and a final period."""
    text = text.replace(",", "").replace("$", "").rpartition("#### ")[2]
    return re.sub(r"\.$", "", text).lower()


def _until_closing_brace(text: str) -> str:
    """Return the text up to the brace that closes a box; the text starts after the opening brace."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text
