"""HumanEval and MBPP: reading problems and running programs."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from refusion_lit.sandbox.runner import Sandbox
from refusion_lit.tasks import SPLITS, CodeTask, HumanEval, Mbpp
from refusion_lit.tasks.code import extract_code
from support.benchmark_data import benchmark_file
from tasks.conftest import Hub
from tasks.samples import HUMANEVAL, MBPP, write_jsonl


def _can_isolate() -> bool:
    try:
        return len(Sandbox().applied) > 0
    except ValueError as error:
        if "minimum_isolation" not in str(error):
            raise
        return False


runs_code = pytest.mark.skipif(not _can_isolate(), reason="this machine offers no full isolation of generated code")


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("    return 1", "    return 1"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```\nx\n```", "x"),
        ("```py\na\n```\n```python\nlonger\n```", "longer"),
        ("```python\ncut off", "cut off"),
        ("```python\n```\nSorry, here:\n```python\nx = 3\n```\n", "x = 3"),
        ("```bash\npip install x\n```\nHere it is:\n```python\ny = 2\n```\n", "y = 2"),
        ("```text\na longer text than the program\n```", "```text\na longer text than the program\n```"),
        ("```" + " " * 200_000, "```" + " " * 200_000),
    ],
)
def test_code_is_extracted_from_fences(response: str, code: str) -> None:
    assert extract_code(response) == code


@runs_code
def test_humaneval(tmp_path: Path) -> None:
    task = HumanEval(files=write_jsonl(tmp_path / "h.jsonl", [HUMANEVAL]), allow_code_execution=True)
    (example,) = task.examples("test")
    assert (example.id, example.query, example.response) == (
        "HumanEval/900", HUMANEVAL["prompt"], HUMANEVAL["canonical_solution"])  # fmt: skip
    assert (task.examples("train"), task.examples("validation")) == ([], [])
    right = [
        example.response,
        "    return half(half(x))\n\nprint(1 / 0)\ndef other(:",
        "```python\ndef quarter(x):\n    return math.fabs(half(x) / 2)\n```",
        "def quarter(x):\n    return x / 4",
    ]
    wrong = [
        "    return x",
        "",
        "    pass\n",
        "def quarter(x):\n    import os\n    os._exit(0)",
        "    raise SystemExit",
        "    import os\n    for _ in range(1500):\n        os.mkdir('a')\n        os.chdir('a')\n    return x",
        "    open('large', 'wb').write(bytes(20 << 20))\n    return x / 4",
        "    raise ValueError('\\ud800')",
    ]
    assert [task.score(example, text) for text in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)


@runs_code
def test_mbpp(tmp_path: Path) -> None:
    rows = [{**MBPP, "task_id": number} for number in (10, 11, 510, 511, 600, 601)]
    task = Mbpp(files=write_jsonl(tmp_path / "m.jsonl", rows), allow_code_execution=True)
    ids = {split: [e.id for e in task.examples(split)] for split in ("train", "validation", "test")}
    assert ids == {
        "train": ["MBPP/10", "MBPP/601"],
        "validation": ["MBPP/511", "MBPP/600"],
        "test": ["MBPP/11", "MBPP/510"],
    }
    example = task.examples("test")[0]
    assert all(test in example.query for test in [MBPP["text"], *MBPP["test_list"]])
    assert task.score(example, example.response) == 1
    assert task.score(example, f"Here:\n```python\n{MBPP['code']}\n```") == 1
    assert task.score(example, example.response.replace("a + b", "a - b")) == 0


@pytest.mark.parametrize(("cls", "row"), [(HumanEval, HUMANEVAL), (Mbpp, MBPP)])
def test_nothing_runs_unless_allowed(tmp_path: Path, cls: type[CodeTask], row: object) -> None:
    task = cls(files=write_jsonl(tmp_path / "x.jsonl", [row]))
    (example,) = task.examples("test")
    assert task.score(example, example.response) is None
    with pytest.raises(ValueError, match=r"allow_code_execution: .*true"):
        _ = task.sandbox
    assert "sandbox" not in task.__dict__


@pytest.mark.parametrize(
    ("cls", "row", "message"),
    [
        (HumanEval, {**HUMANEVAL, "test": 3}, r"x\.jsonl:1: .*'test', got int"),
        (HumanEval, {"task": "a"}, r"x\.jsonl:1: .*'prompt'"),
        (Mbpp, {**MBPP, "task_id": "11"}, r"x\.jsonl:1: .*integer.*'task_id', got '11'"),
        (Mbpp, {**MBPP, "test_list": []}, r"x\.jsonl:1: .*'test_list', got \[\]"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, cls: type[CodeTask], row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(files=write_jsonl(tmp_path / "x.jsonl", [row])).examples("test")


def test_bad_options_and_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [MBPP, MBPP])
    with pytest.raises(ValueError, match=r"x\.jsonl:2: .*got MBPP/11"):
        Mbpp(files=path).examples("test")
    with pytest.raises(ValueError, match=r"task\.files: .*task\.dataset, got 'neither'"):
        Mbpp()
    with pytest.raises(ValueError, match="got 'both'"):
        Mbpp(files=path, dataset="some/data")
    with pytest.raises(ValueError, match="minimum_isolation"):
        Mbpp(files=path, minimum_isolation="most")  # type: ignore[arg-type]
    for cls in (HumanEval, Mbpp):
        with pytest.raises(ValueError, match="template"):
            cls(files=path, template="solve it")


@runs_code
@pytest.mark.parametrize(("cls", "name"), [(HumanEval, "humaneval/HumanEval.jsonl.gz"), (Mbpp, "mbpp/mbpp.jsonl")])
def test_a_sample_of_the_canonical_solutions_passes(cls: type[CodeTask], name: str) -> None:
    task = cls(files=str(benchmark_file(name)), allow_code_execution=True)
    examples = task.examples("test")
    assert len(examples) == (164 if cls is HumanEval else 500)
    if os.environ.get("REFUSION_LIT_ALL_SOLUTIONS"):  # a minute or two
        examples = [example for split in SPLITS for example in task.examples(split)]
        assert [e.id for e in examples if task.score(e, e.response) != 1] == []
    for example in Random(0).sample(examples, 12):
        assert task.score(example, example.response) == 1, example.id
        assert task.score(example, "def nothing():\n    pass\n") == 0, example.id


@pytest.mark.parametrize(
    ("cls", "splits", "test", "train"),
    [
        (
            Mbpp,
            {"train": [{**MBPP, "task_id": 601}], "prompt": [{**MBPP, "task_id": 1}], "test": [MBPP]},
            ["MBPP/11"],
            ["MBPP/1", "MBPP/601"],
        ),
        (HumanEval, {"test": [HUMANEVAL]}, ["HumanEval/900"], []),
    ],
)
def test_problems_from_a_hub_data_set(
    hub: Hub, cls: type[CodeTask], splits: dict[str, list], test: list[str], train: list[str]
) -> None:
    hub.splits = splits
    task = cls(**hub.address)
    assert [example.id for example in task.examples("test")] == test
    assert sorted(example.id for example in task.examples("train")) == train
