"""The task Records: rows to sort and to write as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.tasks import Example, Records

EXAMPLE = Example(
    id="x",
    query="sort by age: eve 82 rome; bob 31 oslo",
    response='[{"name":"bob","age":31,"city":"oslo"},{"name":"eve","age":82,"city":"rome"}]',
)


@given(index=st.integers(0, 199_999), seed=st.integers(), max_rows=st.integers(2, 9))
def test_rows_are_sorted_and_written_as_json(index: int, seed: int, max_rows: int) -> None:
    example = Records(max_rows=max_rows, seed=seed).examples("train")[index]
    match = re.fullmatch(r"sort by (name|age|city): ([a-z]+ \d\d [a-z]+(?:; [a-z]+ \d\d [a-z]+)+)", example.query)
    assert match
    rows = [row.split() for row in match[2].split("; ")]
    assert 2 <= len(rows) <= max_rows
    for values in zip(*rows, strict=True):
        assert len(set(values)) == len(rows)
    column = ["name", "age", "city"].index(match[1])
    rows.sort(key=lambda row: row[column])  # two-digit numbers sort alike as text
    objects = [f'{{"name":"{name}","age":{age},"city":"{city}"}}' for name, age, city in rows]
    assert example.response == "[" + ",".join(objects) + "]"


def test_rows_and_columns_are_equally_frequent() -> None:
    queries = [example.query for example in Records().examples("train")[:3000]]
    for counts in (
        Counter(query.count(";") for query in queries),
        Counter(query.split(":")[0] for query in queries),
    ):
        assert len(counts) == 3
        assert all(850 < count < 1150 for count in counts.values())  # 1000 expected, deviation 26


@pytest.mark.parametrize(
    "response",
    [
        EXAMPLE.response,
        json.dumps(json.loads(EXAMPLE.response), indent=2),
        '[{"age":31,"name":"bob","city":"oslo"},{"city":"rome","name":"eve","age":82}]',
    ],
)
def test_json_of_the_same_value_is_correct(response: str) -> None:
    assert Records().score(EXAMPLE, response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        '[{"name":"eve","age":82,"city":"rome"},{"name":"bob","age":31,"city":"oslo"}]',  # order
        '[{"name":"bob","age":"31","city":"oslo"},{"name":"eve","age":82,"city":"rome"}]',  # type
        '[{"name":"bob","age":31},{"name":"eve","age":82,"city":"rome"}]',
        '[{"name":"bob","age":31,"city":"oslo","x":1},{"name":"eve","age":82,"city":"rome"}]',
        '[{"name":"bob","age":30,"age":31,"city":"oslo"},{"name":"eve","age":82,"city":"rome"}]',  # repeated key
        '[{"age":{},"age":31,"age":[]}]',
        '[[["age",31],["city","oslo"],["name","bob"]],[["age",82],["city","rome"],["name","eve"]]]',
        '[{"name":"bob","age":31,"city":"oslo"},{"name":"eve","age":82,"city":"rome"}',
        "[" + EXAMPLE.response + "]",
        EXAMPLE.response[1:-1],
        "null",
        "[" * 200_000,
        "9" * 5000,
        "",
    ],
)
def test_anything_else_is_wrong(response: str) -> None:
    assert Records().score(EXAMPLE, response) == 0.0
