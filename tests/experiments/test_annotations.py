"""The calculator annotations that the conversion experiment counts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from support.benchmark_data import benchmark_file

PROGRAM = Path(__file__).parents[2] / "experiments" / "real_conversion" / "annotations.py"
count_annotations = runpy.run_path(str(PROGRAM))["count_annotations"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48/2 = <<48/2=24>>24 and <<48+24=72>>72", (2, 2)),
        ("<<48/2=25>>", (0, 1)),
        ("<<(3+4)*2-1=13>> <<-3+5=2>> <<.5*10=5>> <<05*2=10>> <<1.05*2=2.10>>", (5, 5)),
        ("<<10/3=3.33>> <<2/3=0.66>> <<2/3=0.67>> <<7/2=3>> <<7/2=4>>", (5, 5)),
        ("<<10/3=3.35>> <<7/2=5>> <<2+2=5>> <<12*1.5=18.5>>", (0, 4)),
        ("<<1/0=0>> <<=3>> <<2+=2>> <<2**3=8>> <<9//2=4>> <<3(2)=6>> <<2+2=4=4>> <<2+2>> <<a+1=2>>", (0, 9)),
        ("<<2+2=4", (0, 1)),
        ("<<2+2=4>> and <<3+", (1, 2)),
        ("<<" + "(" * 90 + "1" + "=1>>", (0, 1)),
        ("<<" + "1+" * 5000 + "1=5001>>", (0, 1)),
        ("2+2=4", (0, 0)),
    ],
)
def test_annotations_and_those_that_are_right(text: str, expected: tuple[int, int]) -> None:
    assert count_annotations(text) == expected


def test_nearly_all_annotations_of_the_data_are_right() -> None:
    rows = [json.loads(line) for line in benchmark_file("gsm8k/test.jsonl").read_text().splitlines()]
    num_right, num = map(sum, zip(*(count_annotations(row["answer"]) for row in rows), strict=True))
    assert 0.98 < num_right / num < 1
