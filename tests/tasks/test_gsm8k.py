"""GSM8K: final numbers and scores."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

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
    ],
)
def test_the_final_number_of_a_solution(text: str, expected: int | None) -> None:
    assert extract_answer(text) == expected


def test_scores(tmp_path: Path) -> None:
    task = Gsm8k(test=write_jsonl(tmp_path / "test.jsonl", [{"question": "q", "answer": "a\n#### 1,000"}]))
    (example,) = task.examples("test")
    assert [task.score(example, text) for text in ("#### 1000.0", "\\boxed{1,000}", "1000", "#### 100")] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"example e: .*####"):
        task.score(Example(id="e", query="q", response="eighteen"), "#### 18")


def test_the_published_references_have_final_numbers_and_are_correct() -> None:
    task = Gsm8k(test=str(benchmark_file("gsm8k/test.jsonl")))
    examples = task.examples("test")
    assert len(examples) == 1319
    for example in examples:
        shown = example.response.rsplit("#### ", 1)[1]
        assert extract_answer(example.response) == Fraction(shown.replace(",", ""))
        assert task.score(example, example.response) == 1
        assert task.score(example, f"\\boxed{{{shown}}}") == 1


def test_the_hub_data_set(hub: Hub) -> None:
    hub.splits = {"train": [{"question": "q", "answer": "#### 1"}], "test": [{"question": "r", "answer": "#### 2"}]}
    task = Gsm8k(**hub.address, validation_fraction=0.0)
    assert [(e.query, task.score(e, "\\boxed{2.0}")) for e in task.examples("test")] == [("r", 1.0)]
    assert [e.query for e in task.examples("train")] == ["q"]
