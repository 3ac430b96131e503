"""Native tasks take a published prompt and answer rule from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refusion_lit.tasks import Gsm8k, HumanEval, Mbpp

FENCED = "answer: '```python\\s*\\n(.*?)```'\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    rows: dict[str, dict[str, Any]] = {
        "humaneval": {"task_id": "H/0", "prompt": "def two():\n", "canonical_solution": "    return 2\n",
                      "test": "def check(f):\n    assert f() == 2\n", "entry_point": "two"},
        "mbpp": {"task_id": 11, "text": "Return 2.", "code": "def f():\n    return 2", "test_setup_code": "",
                 "test_list": ["assert f() == 2", "assert f() != 3"]},
        "gsm8k": {"question": "What is 1 + 1?", "answer": "It is 2.\n#### 2"},
    }  # fmt: skip
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return {name: str(tmp_path / f"{name}.jsonl") for name in rows}


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_humaneval_asks_by_the_file_and_cuts_answers_out_of_fences(files: dict[str, str], tmp_path: Path) -> None:
    file = written(tmp_path / "p.yaml", f'template: "Complete {{entry_point}} {{x}}:\\n{{prompt}}"\n{FENCED}')
    task = HumanEval(files=files["humaneval"], protocol=file)
    (example,) = task.examples("test")
    assert example.query == "Complete two {x}:\ndef two():\n"
    response = "First:\n```python\nwrong\n```\nNo:\n```python\ndef two():\n    return 2\n```\nDone."
    program, _ = task.program(example, response)
    assert program == "def two():\n\ndef two():\n    return 2\n\n"
    assert task.program(example, "    return 2")[0] == "def two():\n    return 2\n"


def test_mbpp_asks_by_the_file(files: dict[str, str], tmp_path: Path) -> None:
    file = written(tmp_path / "p.yaml", f'template: "Task: {{text}} Tests: {{tests}}"\n{FENCED}')
    task = Mbpp(files=files["mbpp"], protocol=file)
    (example,) = task.examples("test")
    assert example.query == "Task: Return 2. Tests: assert f() == 2\nassert f() != 3"
    assert task.program(example, "x\n```python\ndef f(): return 2\n```")[0].strip() == "def f(): return 2"


def test_gsm8k_takes_another_answer_marker(files: dict[str, str], tmp_path: Path) -> None:
    file = written(
        tmp_path / "p.yaml", 'template: "Q: {query}\\nReason first.\\nA:"\nanswer: "The answer is (.*?)\\\\.$"\n'
    )
    task = Gsm8k(test=files["gsm8k"], protocol=file)
    (example,) = task.examples("test")
    assert example.query == "Q: What is 1 + 1?\nReason first.\nA:"
    assert task.score(example, "1 + 1 = 2.\nThe answer is $2.00.") == 1
    assert task.score(example, "The answer is 2.\nNo. The answer is 3.") == 0, "the last match counts"
    assert task.score(example, "#### 2") == 1, "without a match the task's own rule counts"
    plain = Gsm8k(test=files["gsm8k"])
    assert plain.examples("test")[0].query == "What is 1 + 1?"
    assert plain.score(example, "The answer is 2.") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tempalte: x\n", "expected a file with template and answer, got 'tempalte'"),
        ("template: no field\n", r"expected a template with \{text\} in it"),
        ("answer: '(open'\n", "expected a regular expression as answer"),
        ("template: [a]\n", "expected text in every option"),
    ],
)
def test_wrong_files_are_refused_at_once(files: dict[str, str], tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^task\.protocol: {message}"):
        Mbpp(files=files["mbpp"], protocol=written(tmp_path / "wrong.yaml", text))
    with pytest.raises(ValueError, match=r"^task\.protocol: "):
        Mbpp(files=files["mbpp"], protocol=str(tmp_path / "missing.yaml"))
