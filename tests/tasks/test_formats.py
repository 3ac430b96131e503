"""Data as people have it: turns of chats, usual field names, tables, and data sets in memory."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from refusion_lit.tasks import InstructionFiles
from tasks.samples import write_jsonl

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
]
NAN = float("nan")
PAIR = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_every_assistant_turn_of_a_chat_is_a_response(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"id": "7", "chat": CHAT}])
    options: dict[str, Any] = {"train": path, "preset": "messages", "query_field": "chat", "validation_fraction": 0}
    first, last = InstructionFiles(**options).examples("train")
    assert (list(first.messages), first.query, first.response) == (CHAT[:2], "a", "b")
    assert (list(last.messages), last.query, last.response) == (CHAT[:4], "c", "d")
    assert (first.id, last.id) == ("7#turn3", "7")
    assert InstructionFiles(**options, assistant_turns="last").examples("train") == [last]
    assert InstructionFiles(**options, test=path).examples("test") == [last], "a test prompts once for each row"


def test_turns_of_calls_are_trained_and_turns_of_weight_0_are_context(tmp_path: Path) -> None:
    """Of four turns of the assistant, two have weight 0: the first text, and the last."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    in_json = {**call, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    turns = [CHAT[1], in_json, {"role": "tool", "content": "1"}, {**CHAT[2], "weight": 0}, CHAT[3], CHAT[4], CHAT[5],
             {**CHAT[4], "weight": 0}]  # fmt: skip
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": turns}])
    task = InstructionFiles(train=path, validation_fraction=0)
    [alone] = task.examples("train")
    assert task.num_context_turns["train"] == 1
    first, last = InstructionFiles(train=path, validation_fraction=0, assistant_parts="all").examples("train")
    assert alone == last
    assert (list(first.messages), first.response, first.answer) == (turns[:1], "", call)
    assert (list(last.messages), last.response, last.answer) == ([turns[0], call, *turns[2:5]], "d", None)


@pytest.mark.parametrize("mark", ["weight", "train", "training", "loss"])
def test_marks_of_other_programs_keep_turns_out_of_training(mark: str) -> None:
    turns = [CHAT[1], {**CHAT[2], mark: False}, CHAT[3], {**CHAT[4], mark: True}]
    [example] = InstructionFiles.from_rows([{"messages": turns}], validation_fraction=0).examples("train")
    assert (example.response, list(example.messages)) == ("d", turns[:3])


@pytest.mark.parametrize("field", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR}, {"conversations": PAIR}, {"prompt": PAIR[:1], "completion": PAIR[1:]},
        {"query": "a", "response": "b"}, {"question": "a", "answer": "b"}, {"instruction": "a", "output": "b"},
    ],
)  # fmt: skip
def test_the_system_text_of_a_row_is_a_turn(row: dict[str, Any], field: str) -> None:
    [example] = InstructionFiles.from_rows([{**row, field: "s"}], validation_fraction=0).examples("train")
    assert (list(example.messages), example.response) == ([CHAT[0], PAIR[0]], "b")


def test_columns_of_structs_leave_no_nulls_in_calls_and_tools(tmp_path: Path) -> None:
    """In a Parquet column, every call has the arguments of all calls. A null stands for an argument of another call."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"content": "x"})]
    tools = [{"name": "f", "properties": {"a": {"type": "int"}}}, {"name": "g", "properties": {"b": {"enum": ["x"]}}}]
    turns = [PAIR[0], {"role": "assistant", "content": None, "tool_calls": calls}]
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns, "tools": tools}]), path)
    options: dict[str, Any] = {"validation_fraction": 0, "assistant_parts": "all"}
    [example] = InstructionFiles(train=str(path), **options).examples("train")
    assert (example.answer, example.meta["tools"], list(example.messages)) == (turns[1], tools, turns[:1])
    # JSON states what it has: an argument that is null stays.
    turns = [PAIR[0], {**turns[1], "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]}]
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": turns}])
    [example] = InstructionFiles(train=path, **options).examples("train")
    assert example.answer == turns[1]


@pytest.mark.parametrize(
    ("row", "num_turns"),
    [
        ({"query": "a", "response": "b"}, 0),
        ({"question": "a", "answer": "b"}, 0),
        ({"instruction": "a", "input": "", "output": "b"}, 0),
        ({"instruction": "a", "output": "b", "system": "s", "history": [["q", "r"]]}, 4),
        ({"prompt": "a", "completion": "b"}, 0),
        ({"prompt": [PAIR[0]], "completion": [PAIR[1]]}, 1),
        ({"messages": PAIR}, 1),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, 1),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}, 2),
        ({"conversations": PAIR, "source": "x"}, 1),
        ({"messages": json.dumps(PAIR)}, 1),
        ({"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in PAIR]}, 1),
        ({"messages": PAIR, "query": "", "response": None}, 1),
        ({"messages": [CHAT[0], *PAIR], "system": "s"}, 2),
        # pandas writes NaN where a value is missing
        ({"messages": PAIR, "query": NAN, "response": NAN, "system": NAN, "tools": NAN}, 1),
        ({"instruction": "a", "input": NAN, "output": "b", "history": NAN}, 0),
        ({"instruction": "", "input": "a", "output": "b"}, 0),
    ],
)
def test_usual_fields_are_recognised(tmp_path: Path, row: dict[str, Any], num_turns: int) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [row])
    [example] = InstructionFiles(train=path, validation_fraction=0).examples("train")
    assert (example.query, example.response, len(example.messages)) == ("a", "b", num_turns)


def test_calls_of_sharegpt_are_calls_of_the_assistant(tmp_path: Path) -> None:
    turns = [
        ("human", "a"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "2"),
        ("gpt", "b"),
    ]
    row = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    task = InstructionFiles(
        train=write_jsonl(tmp_path / "x.jsonl", [row]), validation_fraction=0, assistant_parts="all"
    )
    call, answer = task.examples("train")
    assert call.answer is not None
    assert call.answer["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert [turn["role"] for turn in answer.messages] == ["user", "assistant", "tool"]
    assert answer.response == "b"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [*PAIR, {"role": "user", "content": 3}]}, r"x\.jsonl:1: .*turn 3 \(user\)"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, r"x\.jsonl:1: turn 1 .*JSON text.*f\(1\)"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, r"x\.jsonl:1: turn 1 .*human, .*'from', got 'alien'"),
        ({"instruction": "a", "output": "b", "history": ["q"]}, r"x\.jsonl:1: history: .*pairs"),
        ({"query": None, "response": "b"}, r"x\.jsonl:1: .*'query', got NoneType; fill it in"),
        ({"instruction": "a", "output": "b", "input": 0}, r"x\.jsonl:1: .*'input', got int"),
        ({"prompt": [PAIR[0]], "completion": "b"}, r"x\.jsonl:1: .*'prompt', got list"),
        ({"query": "a", "response": "b", "messages": PAIR}, r"x\.jsonl:1: .*query_response, messages.*task\.preset"),
        ({"messages": [CHAT[0], *PAIR], "system": "t"}, r"x\.jsonl:1: .*turn 1 \(system\).*'t'"),
        ({"messages": PAIR, "chat_template_kwargs": {"a": 1}}, r"x\.jsonl:1: chat_template_kwargs: .*data\.chat_t"),
        ({"messages": [{"role": "human", "content": "a"}]}, r"x\.jsonl:1: .*got turns of human"),
        ({"messages": [PAIR[0], {**PAIR[1], "thinking": "c"}]}, r"x\.jsonl:1: messages: .*thinking.*assistant_parts"),
        ({"messages": [PAIR[0], {**PAIR[1], "reasoning": "c"}]}, r"x\.jsonl:1: messages: .*reasoning.*assistant_parts"),
        ({"messages": PAIR, "functions": [3]}, r"x\.jsonl:1: functions: "),
    ],
)
def test_errors_name_row_turn_and_values(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [row])
    with pytest.raises(ValueError, match=message):
        InstructionFiles(train=path, validation_fraction=0).examples("train")


def test_functions_are_tools_and_tools_belong_to_rows_of_any_format() -> None:
    function = {"name": "f", "parameters": {}}
    tool = {"type": "function", "function": function}
    rows = [
        {"messages": PAIR, "functions": [function]},
        {"messages": PAIR, "tools": json.dumps([tool])},
        {"query": "a", "response": "b", "tools": [tool]},
    ]
    examples = InstructionFiles.from_rows(rows, validation_fraction=0).examples("train")
    assert [example.meta["tools"] for example in examples] == [[tool]] * 3


class Torch(Dataset[dict[str, str]]):
    """A torch data set, which has no end of its own: ``__getitem__`` takes any index."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"prompt": f"q{index}", "completion": "r"}


def test_csv_parquet_and_data_sets_are_read_like_json_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": "r"} for i in range(3)]
    text = "prompt,completion\r\n" + "".join(f'"q{i}","r"\r\n' for i in range(3))
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(text.encode()))
    sources: list[Any] = [rows, Torch(), write_jsonl(tmp_path / "x.jsonl", rows)]
    sources += [str(tmp_path / "x.csv"), str(tmp_path / "x.csv.gz")]
    for name, delimiter in {"semicolons": ";", "tabs": "\t"}.items():  # as spreadsheets write them in many languages
        (tmp_path / f"{name}.csv").write_bytes(text.replace(",", delimiter).encode())
        sources.append(str(tmp_path / f"{name}.csv"))
    try:
        import datasets
    except ImportError:
        pass
    else:
        hub_rows = datasets.Dataset.from_list(rows)
        hub_rows.to_parquet(str(tmp_path / "x.parquet"))
        sources += [hub_rows, str(tmp_path / "x.parquet")]
    for source in sources:
        task = InstructionFiles.from_rows(source, validation_fraction=0)
        assert [(e.query, e.response) for e in task.examples("train")] == [(f"q{i}", "r") for i in range(3)]
        assert len({e.id for e in task.examples("train")}) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"prompt,completion\na\n", r"x\.csv:2: expected 2 fields .*, got 1"),
        ("x.csv", b"prompt,prompt\na,b\n", r"x\.csv:1: .*once"),
        ("x.csv", b'prompt,completion\n"a,b\n', r"x\.csv:2: broken CSV"),
        ("x.csv", b"prompt,answer\na,b\n", r"x\.csv:2: .*'prompt', 'answer'.*data\.task\.preset"),
        ("x.csv", b"prompt,completion\n", "at least one sample"),
        ("x.txt", b"a", r"\.csv.*\.parquet"),
        ("x.jsonl", b"prompt,completion\na,b\n", r"x\.jsonl:1: broken JSON.*\.csv"),
        ("x.jsonl", b'[\n {"prompt": "a", "completion": "b"}\n]\n', r"x\.jsonl:1: broken JSON.*\.json\b"),
    ],
)
def test_broken_tables_are_named_with_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        InstructionFiles(train=str(tmp_path / name)).examples("train")


@pytest.mark.parametrize("name", ["x", "x.jsonl", "x.parquet"])
def test_a_directory_of_files_is_called_a_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"x.*: expected a data file, got a directory"):
        InstructionFiles(train=str(tmp_path / name)).examples("train")


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"x\.parquet: .*Parquet"):
        InstructionFiles(train=str(tmp_path / "x.parquet")).examples("train")


def test_parquet_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        InstructionFiles(train=str(tmp_path / "x.parquet")).examples("train")


class _Columns:
    """A table, as pandas has it, whose keys are the names of columns."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> list[str]:
        return {"query": ["a"], "response": ["b"]}[name]


@pytest.mark.parametrize("data", [3, {"query": "a"}, [3], _Columns()])
def test_what_is_no_data_set_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        InstructionFiles.from_rows(data).examples("train")


@pytest.mark.parametrize(("num_rows", "fraction", "count"), [(2, 0.05, 1), (10, 0.25, 2), (501, 0.1, 50), (9, 0.99, 8)])
def test_the_exact_share_is_held_out(num_rows: int, fraction: float, count: int) -> None:
    rows = [{"query": f"q{i}", "response": "r"} for i in range(num_rows)]
    task = InstructionFiles.from_rows(rows, validation_fraction=fraction)
    held_out = {example.query for example in task.examples("validation")}
    assert len(held_out) == count
    assert {example.query for example in task.examples("train")} == {row["query"] for row in rows} - held_out


def test_a_conversation_and_its_copies_are_on_one_side() -> None:
    rows = [{"messages": [*PAIR, {"role": "user", "content": f"q{i // 5}"}, PAIR[1]]} for i in range(40)]
    task = InstructionFiles.from_rows(rows, validation_fraction=0.3)
    train, validation = ({e.query for e in task.examples(split) if e.query != "a"} for split in ("train", "validation"))
    assert not train & validation
    assert len(train | validation) == 40 / 5
    assert len(task.examples("validation")) == 10 * len(validation), "all copies, with both of their turns"
