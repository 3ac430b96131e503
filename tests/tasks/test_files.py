"""Instruction data from files and from the hub: presets, splits and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from refusion_lit.tasks import InstructionFiles
from tasks.conftest import Hub
from tasks.samples import ROWS, write_jsonl


@pytest.mark.parametrize(
    ("preset", "row", "query", "response"),
    [
        ("query_response", {"query": "a", "response": "b"}, "a", "b"),
        ("question_answer", {"question": "a", "answer": "b"}, "a", "b"),
        ("instruction", {"instruction": "a", "input": "c", "output": "b"}, "a\n\nc", "b"),
        ("instruction", {"instruction": "a", "input": "", "output": "b"}, "a", "b"),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "a",
            "b",
        ),
    ],
)
def test_presets(tmp_path: Path, preset: str, row: object, query: str, response: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [row])
    (example,) = InstructionFiles(train=path, test=path, preset=preset, validation_fraction=0).examples("test")
    assert (example.query, example.response) == (query, response)
    assert len(example.messages) == (1 if preset == "messages" else 0)


def test_fields_can_be_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"in": "a", "out": "b"}])
    task = InstructionFiles(train=path, test=path, query_field="in", response_field="out")
    assert task.examples("test")[0].response == "b"


def test_a_fraction_is_held_out_by_content(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "response": "r"} for i in range(400)]
    task = InstructionFiles(train=write_jsonl(tmp_path / "a.jsonl", rows), validation_fraction=0.25)
    train, validation = ({e.query for e in task.examples(s)} for s in ("train", "validation"))
    assert not train & validation
    assert len(train | validation) == 400
    assert 60 < len(validation) < 140
    reversed_task = InstructionFiles(train=write_jsonl(tmp_path / "b.jsonl", rows[::-1]), validation_fraction=0.25)
    assert {e.query for e in reversed_task.examples("validation")} == validation
    assert len({e.id for s in ("train", "validation") for e in task.examples(s)}) == 400


def test_several_files_have_distinct_ids(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / name, ROWS) for name in ("a.jsonl", "b.jsonl")]
    task = InstructionFiles(train=paths, validation_fraction=0)
    assert len({e.id for e in task.examples("train")}) == 12


def test_a_directory_is_no_data_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a data file"):
        InstructionFiles(train=str(tmp_path)).examples("train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"query": "a", "response": "b"}\n{"query": \n', r"x\.jsonl:2: broken JSON"),
        (b'{"query": "a", "respons": "b"}\n', r"x\.jsonl:1: .*'response'.* 'respons'"),
        (b'{"foo": "a"}\n', r"x\.jsonl:1: .*'query'.* 'foo'"),
        (
            b'{"question": "a", "reply": "b"}\n',
            r"x\.jsonl:1: .*'query'.*'reply'.*data\.task\.query_field.*data\.task\.preset.*conversations",
        ),
        (b'{"query": 3, "response": "b"}\n', r"x\.jsonl:1: .*text.*'query', got int"),
        (b'{"query": "a", "response": " "}\n', r"x\.jsonl:1: .*, got ' '"),
        (b"[1]\n", r"x\.jsonl:1: .*object, got list"),
    ],
)
def test_bad_files_are_named_with_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        InstructionFiles(train=str(path)).examples("train")


def test_malformed_samples_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"query": "a", "response": "b"}\n{broken\n{"query": "c"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: .*malformed: skip"):
        InstructionFiles(train=str(path), validation_fraction=0).examples("train")
    task = InstructionFiles(train=str(path), validation_fraction=0, malformed="skip")
    assert len(task.examples("train")) == 1
    assert task.num_malformed["train"] == 2


def answer(number: int, reason: str, score: float | None, text: str = "b") -> dict[str, Any]:
    return {"id": number, "query": "a", "response": text, "finish_reason": reason, "score": score}


@pytest.mark.parametrize(
    ("keep", "expected"), [("all", ["1", "2", "3", "5"]), ("finished", ["1", "2", "5"]), ("correct", ["2"])]
)
def test_answers_of_a_model_are_kept_by_how_they_ended_and_scored(
    tmp_path: Path, keep: Literal["all", "finished", "correct"], expected: list[str]
) -> None:
    rows = [answer(1, "eos", 0.5), answer(2, "eos", 1.0), answer(3, "length", 1.0), answer(5, "eos", 0.0)]
    if keep != "all":  # which would refuse an empty answer
        rows.append(answer(4, "eos", 1.0, " "))
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    task = InstructionFiles(train=path, validation_fraction=0, keep=keep)
    assert [example.id for example in task.examples("train")] == expected
    assert task.num_left_out["train"] == len(rows) - len(expected)
    tested = InstructionFiles(train=path, test=path, keep=keep, malformed="skip").examples("test")
    assert [example.id for example in tested] == ["1", "2", "3", "5"], "all but an empty answer"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROWS[0], r"x\.jsonl:1: .*'finish_reason'.*task\.keep: all"),
        (answer(1, "eos", None), r"x\.jsonl:1: .*'score', got None; .*refusion-lit score"),
    ],
)
def test_rows_that_do_not_say_whether_to_keep_them_are_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [row])
    with pytest.raises(ValueError, match=message):
        InstructionFiles(train=path, validation_fraction=0, keep="correct").examples("train")


def test_a_rows_own_id_is_kept(tmp_path: Path) -> None:
    rows = [{"id": "a-1", **ROWS[0]}, {"id": 7, **ROWS[1]}, {"id": None, **ROWS[2]}, ROWS[3]]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    task = InstructionFiles(train=path, validation_fraction=0)
    assert [e.id for e in task.examples("train")] == ["a-1", "7", "train:x.jsonl:3", "train:x.jsonl:4"]


def test_an_id_that_two_rows_have_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"id": "a", **ROWS[0]}, ROWS[1], {"id": "a", **ROWS[2]}])
    with pytest.raises(ValueError, match=r"x\.jsonl:3: .* id .*x\.jsonl:1, got 'a'"):
        InstructionFiles(train=path, validation_fraction=0).examples("train")
    assert len(InstructionFiles(train=path, validation_fraction=0, malformed="skip").examples("train")) == 2


def test_invalid_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no\\.jsonl: expected a data file"):
        InstructionFiles(train=str(tmp_path / "no.jsonl")).examples("train")
    with pytest.raises(ValueError, match=r"task\.train"):
        InstructionFiles()
    with pytest.raises(ValueError, match="validation_fraction"):
        InstructionFiles(train="x.jsonl", validation_fraction=1.0)


def test_score_ignores_surrounding_white_space(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"query": "a", "response": "b c"}])
    task = InstructionFiles(train=path, test=path)
    example = task.examples("test")[0]
    assert (task.score(example, " b c\n"), task.score(example, "b  c")) == (1.0, 0.0)


def test_files_of_one_name_in_two_folders_have_distinct_ids(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(write_jsonl(tmp_path / folder / "rows.jsonl", ROWS))
    task = InstructionFiles(train=paths, validation_fraction=0)
    assert len({e.id for e in task.examples("train")}) == 12
    with pytest.raises(ValueError, match=r"task\.train: .*once"):
        InstructionFiles(train=[paths[0], paths[0]]).examples("train")
    (tmp_path / "link.jsonl").symlink_to(paths[0])
    with pytest.raises(ValueError, match=r"task\.train: .*once"):
        InstructionFiles(train=[paths[0], str(tmp_path / "link.jsonl")]).examples("train")


@pytest.mark.parametrize(
    "turns",
    [
        None,
        "hi",
        [],
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}],
        [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b"}],
    ],
)
def test_chats_that_cannot_be_used(tmp_path: Path, turns: object) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": turns}])
    with pytest.raises(ValueError, match=r"x\.jsonl:1: .*expected "):
        InstructionFiles(train=path, preset="messages").examples("train")


def test_an_instruction_whose_input_is_not_text_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"instruction": "a", "input": ["b"], "output": "c"}])
    with pytest.raises(ValueError, match=r"x\.jsonl:1: .*'input', got list"):
        InstructionFiles(train=path, preset="instruction").examples("train")


def test_an_option_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.response_field: .*'messages'"):
        InstructionFiles(train="x.jsonl", preset="messages", response_field="answer")


def test_a_hub_data_set(hub: Hub) -> None:
    task = InstructionFiles(**hub.address, train="train_sft", validation_fraction=0.5)
    train, validation, test = (task.examples(split) for split in ("train", "validation", "test"))
    assert sorted(e.query for e in [*train, *validation]) == [row["query"] for row in ROWS]
    assert [e.query for e in test] == ["q0", "q1"]
    assert len({e.id for e in [*train, *validation, *test]}) == 8
    with pytest.raises(ValueError, match=r"task\.dataset: .*some/rows, got 'dev'; .*train_sft, test"):
        InstructionFiles(**hub.address, train="train_sft", validation="dev").examples("validation")
    with pytest.raises(ValueError, match=r"^task\.dataset: .*'none/such'.*\(Dataset [^\n]*exist\.\)"):
        InstructionFiles(dataset="none/such", train="train").examples("train")
    with pytest.raises(ValueError, match=r"some/rows/test:1: .*'question'"):
        InstructionFiles(**hub.address, preset="question_answer").examples("test")


def test_a_hub_data_set_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"^task\.dataset: .*pip install datasets"):
        InstructionFiles(dataset="some/rows").examples("train")


def test_a_report_says_where_its_examples_come_from(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"query": str(i), "response": "a"} for i in range(4)])
    splits = [
        InstructionFiles(train=train, **others).describe_test_split()
        for others in ({"test": train}, {"validation": train}, {})
    ]
    assert splits == ["test split", "validation examples", "validation examples held out of the training files"]
