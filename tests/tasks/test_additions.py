"""The task Additions: lists of sums."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.tasks import Additions, Example
from refusion_lit.tasks.generated import require_between


@given(index=st.integers(0, 199_999), seed=st.integers(), low=st.integers(2, 5), more=st.integers(0, 3))
def test_the_response_has_every_sum_in_order(index: int, seed: int, low: int, more: int) -> None:
    example = Additions(min_terms=low, max_terms=low + more, seed=seed).examples("train")[index]
    assert re.fullmatch(r"[1-9]\d\+[1-9]\d(,[1-9]\d\+[1-9]\d)*>", example.query)
    questions = example.query[:-1].split(",")
    assert low <= len(questions) <= low + more
    assert example.response == "".join(f"{question}={eval(question)};" for question in questions)


def test_numbers_of_terms_and_operands_are_equally_frequent() -> None:
    queries = [example.query for example in Additions().examples("train")[:4000]]
    num_terms = Counter(query.count("+") for query in queries)
    assert set(num_terms) == {2, 3, 4, 5}
    assert all(850 < count < 1150 for count in num_terms.values())  # 1000 expected, deviation 27
    operands = Counter(re.findall(r"\d\d", "".join(queries)))
    assert len(operands) == 90
    assert min(operands.values()) > 200  # 311 expected, deviation 18


def test_format_of_the_published_example() -> None:
    example = Example(id="x", query="12+34,56+78>", response="12+34=46;56+78=134;")
    assert Additions().score(example, "12+34=46;56+78=134;") == 1.0
    assert Additions().score(example, "12+34=46;56+78=134; ") == 0.0


@pytest.mark.parametrize("value", [1, 6])
def test_integers_outside_a_range_are_refused(value: int) -> None:
    for inside in (2, 5):
        require_between("n", inside, 2, 5)
    with pytest.raises(ValueError, match=rf"^n: .* 2 to 5, got {value};"):
        require_between("n", value, 2, 5)
