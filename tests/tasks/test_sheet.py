"""The task Sheet: cells of sums and differences."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.tasks import Sheet


@given(index=st.integers(0, 199_999), seed=st.integers(), num_terms=st.integers(2, 20))
def test_the_response_has_the_result_of_every_cell(index: int, seed: int, num_terms: int) -> None:
    example = Sheet(num_terms=num_terms, seed=seed).examples("train")[index]
    assert re.fullmatch(rf"([1-9]\d[+-][1-9]\d=\.\.\.;){{{num_terms}}}", example.query)
    assert re.fullmatch(rf"(\d\d[+-]\d\d=\d\d\d;){{{num_terms}}}", example.response)
    assert len(example.query) == len(example.response)
    for asked, answered in zip(example.query.split(";")[:-1], example.response.split(";")[:-1], strict=True):
        question, result = answered.split("=")
        assert asked == f"{question}=..."
        assert int(result) == eval(question) >= 0


def test_the_default_has_eight_cells_of_all_kinds() -> None:
    examples = Sheet().examples("train")[:500]
    cells = [cell for example in examples for cell in example.response.split(";")[:-1]]
    assert len(cells) == 8 * 500
    assert 1850 < sum("-" in cell for cell in cells) < 2150  # 2000 expected, deviation 32
    sums = [cell for cell in cells if "+" in cell]
    assert 850 < sum(cell[:2] < cell[3:5] for cell in sums) < 1150  # both orders
