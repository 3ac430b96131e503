"""GSM8K: final numbers and scores."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from refusion_lit.tasks import Example, Gsm8k
from refusion_lit.tasks.gsm8k import extract_answer
from support.benchmark_data import benchmark_file
from tasks.conftest import Hub
from tasks.samples import write_jsonl


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("work\n#### 18", 18),
        ("#### 1,234,567", 1234567),
        ("#### $1,050.50.", Fraction(2101, 2)),
        ("#### -3", -3),
        ("#### \N{MINUS SIGN}3", -3),
        ("#### \N{EN DASH}3", -3),
        ("#### \N{NON-BREAKING HYPHEN}$3", -3),
        ("#### Total \N{EN DASH} 3", 3),
        ("#### - $ 7", -7),
        ("#### 42 apples.", 42),
        ("#### 12.", 12),
        ("#### .5", Fraction(1, 2)),
        ("#### 0.50 kg", Fraction(1, 2)),
        ("#### 75%", 75),
        ("#### +6", 6),
        ("#### 3/4", Fraction(3, 4)),
        ("so \\boxed{18}.", 18),
        ("\\boxed{\\$1,000}", 1000),
        ("\\boxed{18\\text{ eggs}}", 18),
        ("\\boxed{\\frac{1}{2}}", Fraction(1, 2)),
        ("\\boxed{\\dfrac12}", Fraction(1, 2)),
        ("\\boxed{\\frac{-1}{2}}", Fraction(-1, 2)),
        ("#### 2 000 1/2", Fraction(4001, 2)),
        ("#### 1.000,50", Fraction(2001, 2)),
        ("#### -5.000.000.", -5_000_000),
        ("#### 1.000", 1),
        ("\\boxed{\\text{18}}", 18),
        ("\\fbox{18}", 18),
        ("\\boxed{ -2{,}500 }", -2500),
        ("\\fboxed{7}", 7),
        ("#### 1\nno, #### 2", 2),
        ("#### 1\nno, \\boxed{2}", 2),
        ("\\boxed{1} and\n#### 2\n3 more", 2),
        ("\\boxed{5", 5),
        ("the answer is 18", None),
        ("####", None),
        ("####\n18", None),
        ("#### none", None),
        ("#### 1/0", None),
        ("", None),
        ("#### " + "9" * 5000, None),
        ("#### 1/" + "9" * 5000, None),
        ("#### " + " " * 100_000 + "x 5", 5),
        ("#### 1e3", 1000),
        ("#### 2.5E-1 kg", Fraction(1, 4)),
        ("#### 1.5 \\times 10^{3}", 1500),
        ("#### 10^3", 1000),
        ("#### -2^{10} m", -1024),
        ("\\boxed{10^{-2}}", Fraction(1, 100)),
        ("#### 10**3", 1000),
        ("#### 3 \N{MULTIPLICATION SIGN} 10\N{SUPERSCRIPT TWO}", 300),
        ("#### 10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT THREE}", Fraction(1, 1000)),
        ("#### 18 m\N{SUPERSCRIPT TWO}", 18),
        ("#### 18 cm^2", 18),
        ("#### 0^-1", None),
        ("#### " + "9" * 4000 + "^999", 10**4000 - 1),
        ("#### **7**", 7),
        ("#### 7** 8", 7),
        ("#### 5 eggs", 5),
        ("#### 1 000", 1000),
        ("#### 1\N{NARROW NO-BREAK SPACE}234\N{NO-BREAK SPACE}567.5 km", Fraction(2469135, 2)),
        ("#### $12'000", 12000),
        ("#### 1 0000", 1),
        ("#### 2 1/2", Fraction(5, 2)),
        ("#### -2 1/2 cups", Fraction(-5, 2)),
        ("\\boxed{2\\frac{1}{2}}", Fraction(5, 2)),
        ("#### 2\N{VULGAR FRACTION ONE HALF}", Fraction(5, 2)),
        ("#### 1 500/3", 500),
        ("#### 10-3=7", 7),
        ("#### 12 * 3 = 36 eggs for 2 people", 36),
        ("#### 5 + 13 = <<5+13=18>>18", 18),
        ("#### (10 - 3 = 7)", 7),
        ("\\boxed{x = -4}", -4),
        ("#### 5 = x", 5),
        ("#### 18 (as 20 - 2 = 18, and 3 = 3)", 18),
        ("#### " + "(=" * 50_000, None),
    ],
)
def test_the_final_number_of_a_solution(text: str, expected: int | None) -> None:
    assert extract_answer(text) == expected


def test_scores(tmp_path: Path) -> None:
    task = Gsm8k(test=write_jsonl(tmp_path / "test.jsonl", [{"question": "q", "answer": "a\n#### 1,000"}]))
    (example,) = task.examples("test")
    responses = ("#### 1000.0", "\\boxed{1,000}", "1000", "#### 100")
    assert [task.score(example, text)["score"] for text in responses] == [1, 1, 0, 0]
    assert [task.reward(example, text) for text in responses] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"example e: .*####"):
        task.score(Example(id="e", query="q", response="eighteen"), "#### 18")


RESPONSES = [
    "#### 18", "work\n#### 18", "#### 18.", "#### 18.0", "#### $18", "####18", "####  18", "#### 1,8", "#### -18",
    "#### 18 dollars", "#### 18\n#### 4", "#### 4\n#### 18", "#### 18\n\nQuestion: What is 2+2?\n#### 4",
    "#### 18</s> 5", "#### 18<|im_end|>7", "Question: #### 18", "The answer is 18 dollars.", "**18**", "### 18",
    "\\boxed{18}", "\\boxed{18.}", "$18.", "18,", "18..", "18 .", "10-3=18", "#### 10 - 3 = 18", "#### 20-2=18",
    "5 + 13 = <<5+13=18>>18", "1e18", "1 018", "18 1/2", "-18", "--18", "eighteen", "", "####", "#### .", "#### ,,18",
    "$$", "$18$", "\N{ARABIC-INDIC DIGIT ONE}\N{ARABIC-INDIC DIGIT EIGHT}", "18\n", "18\n4", "x" * 1000 + "18",
    "#### 1234", "#### 1,234", "1,234", "$1,234.", "1234.00", "#### -3", "-3", "\N{MINUS SIGN}3", "5-3", "0.5",
    "#### .5",
]  # fmt: skip


@pytest.mark.parametrize(
    "reference", ["9 * 2 = 18\n#### 18", "#### 1,234", "#### -3", "#### $0.5.", "####  18", "#### 18\n"]
)
def test_further_scores_equal_the_harness(reference: str) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval (pip install lm-eval)")
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())
    options = {k: v for k, v in config["metric_list"][0].items() if k.startswith(("ignore", "regexes"))}
    example = Example(id="e", query="q", response=reference)
    for response in RESPONSES:
        generated = response
        for end in config["generation_kwargs"]["until"]:
            generated = generated.split(end)[0]
        expected = {}
        for entry in config["filter_list"]:
            regex: Any = {key: value for key, value in entry["filter"][0].items() if key != "function"}
            ((text,),) = RegexFilter(**regex).apply([[generated]], [{}])
            match = exact_match_hf_evaluate([text], [example.response], **options)["exact_match"]
            expected[entry["name"].replace("-", "_")] = match
        scores = Gsm8k(test="unused").score(example, response)
        assert {name: scores[name] for name in expected} == expected, response


def test_a_number_without_a_marker_counts_in_the_flexible_score_alone() -> None:
    example = Example(id="e", query="q", response="#### 18")
    for response in ("The answer is 18 dollars.", "**18**", "### 18"):
        scores = Gsm8k(test="unused").score(example, response)
        assert scores == {"score": 0, "strict_match": 0, "flexible_extract": 1}, response
    scores = Gsm8k(test="unused").score(example, "#### 18\n\nQuestion: What is 2+2?\n#### 4")
    assert scores == {"score": 0, "strict_match": 1, "flexible_extract": 1}


def test_the_published_references_have_final_numbers_and_are_correct() -> None:
    task = Gsm8k(test=str(benchmark_file("gsm8k/test.jsonl")))
    examples = task.examples("test")
    assert len(examples) == 1319
    for example in examples:
        shown = example.response.rsplit("#### ", 1)[1]
        assert extract_answer(example.response) == Fraction(shown.replace(",", ""))
        assert task.score(example, example.response) == {"score": 1, "strict_match": 1, "flexible_extract": 1}
        assert task.score(example, f"\\boxed{{{shown}}}")["score"] == 1


def test_the_hub_data_set(hub: Hub) -> None:
    hub.splits = {"train": [{"question": "q", "answer": "#### 1"}], "test": [{"question": "r", "answer": "#### 2"}]}
    task = Gsm8k(**hub.address, validation_fraction=0.0)
    assert [(e.query, task.score(e, "\\boxed{2.0}")["score"]) for e in task.examples("test")] == [("r", 1.0)]
    assert [e.query for e in task.examples("train")] == ["q"]
