"""Tasks for infilling: the examples of a generated task with a span of the response left out."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter

import pytest
from experiments.tasks import Spans

from refusion_lit.tasks import Additions, Example, Records

TASKS = [Spans(), Spans(task=Additions(seed=3, min_terms=3)), Spans(task=Records()), Spans(task=Records(max_rows=9))]


def blanks(example: Example) -> list[str]:
    return [example.response[start:stop] for start, stop in example.spans]


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_every_row_has_one_span_in_text_order(task: Spans) -> None:
    for example in task.examples("test")[:100]:
        records = isinstance(task.task, Records)
        ends = [m.end() for m in re.finditer("[}]" if records else ";", example.response)]
        assert len(example.spans) == len(ends)
        for (start, stop), first, last in zip(example.spans, [0, *ends], ends, strict=False):
            assert first <= start < stop <= last
        for value in blanks(example):
            assert re.fullmatch(r"\w+", value)
            values = {str(v) for row in json.loads(example.response) for v in row.values()} if records else set()
            assert value in values or (value.isdigit() and not records)


def fill_in(example: Example) -> str:
    """Return the query with each hidden operand computed from the rest of its sum in the response."""
    rows = []
    for shown, row in zip(example.query[:-1].split(","), example.response.split(";"), strict=False):
        terms, total = shown.split("+"), int(row.split("=")[1])
        known = [int(term) for term in terms if term != "?"]
        rows.append("+".join(str(total - sum(known)) if term == "?" else term for term in terms))
    return ",".join(rows) + ">"


def test_a_query_hides_the_operands_that_are_left_out_and_nothing_else() -> None:
    num_hidden = 0
    for hidden, plain in zip(Spans().examples("test")[:200], Additions().examples("test")[:200], strict=True):
        assert (hidden.id, hidden.response) == (plain.id, plain.response)
        assert fill_in(hidden) == plain.query
        # A span that does not follow the equals sign is an operand.
        num_operands = sum(hidden.response[start - 1 : start] != "=" for start, _ in hidden.spans)
        assert hidden.query.count("?") == num_operands
        num_hidden += num_operands
    assert num_hidden > 100


def test_records_keep_their_query() -> None:
    for hidden, plain in zip(TASKS[2].examples("train")[:20], Records().examples("train")[:20], strict=True):
        assert (hidden.query, hidden.response) == (plain.query, plain.response)


def test_each_value_of_a_row_is_left_out_equally_often() -> None:
    counts = Counter[str]()
    for example in Spans().examples("test")[:300]:
        for start, stop in example.spans:
            before, after = example.response[start - 1 : start], example.response[stop : stop + 1]
            counts[before if before in ("=", "+") else "first operand"] += 1
            assert after in "+=;"
    assert len(counts) == 3
    assert min(counts.values()) > 0.8 * counts.total() / 3


def test_the_score_is_that_of_the_task() -> None:
    [example] = Spans(task=Records()).examples("test")[:1]
    assert Spans(task=Records()).score(example, example.response.replace(":", ": ")) == 1
    assert Spans(task=Records()).score(example, example.response[:-1]) == 0
    [example] = Spans().examples("test")[:1]
    assert Spans().score(example, example.response) == 1
    assert Spans().score(example, example.response[:-1]) == 0


def test_examples_are_functions_of_task_and_index() -> None:
    task = Spans()
    examples = task.examples("validation")
    assert examples[7] == pickle.loads(pickle.dumps(examples))[7] == Spans().examples("validation")[7]
    assert len(examples) == 500
    assert "?" in task.characters()
    assert all(set(e.query + e.response) <= set(task.characters()) for e in examples[:50])
