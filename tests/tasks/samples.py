"""Benchmark rows, data files and a solver of grid puzzles, shared by the tests of tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROWS = [{"query": f"q{i}", "response": f"r{i}"} for i in range(6)]
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": "import math\n\ndef half(x):\n    return x / 2\n\ndef quarter(x):\n    '''A quarter of x.'''\n",
    "canonical_solution": "    return half(half(x))\n",
    "test": "def check(candidate):\n    assert candidate(4) == 1\n",
    "entry_point": "quarter",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to add.",
    "code": "class P:\r\n\tv = 3\r\ndef add(a, b):\r\n\treturn a + b",
    "test_setup_code": "three = P().v",
    "test_list": ["assert add(1, 2) == three", "assert add(0, 0) == 0"],
}


def write_jsonl(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def completions(cells: str, digits: str, peers: Callable[[int], Iterable[int]]) -> Iterator[str]:
    """Yield all ways to fill in the blanks so that no cell repeats a digit of its peers."""
    if "." not in cells:
        yield cells
        return
    blank = cells.index(".")
    taken = {cells[peer] for peer in peers(blank)}
    for digit in digits:
        if digit not in taken:
            yield from completions(cells[:blank] + digit + cells[blank + 1 :], digits, peers)
