"""Arbitrary data, prompt and predictions files are read or refused with a clear error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardness.malformed import MARKUP, NUM_EXAMPLES, PHASES, damaged, outcome, raw_json, with_replaced_values
from refusion_lit.cli.generate import read_prompts
from refusion_lit.evaluation.predictions import PredictionsFile, finished_ids
from refusion_lit.tasks import InstructionFiles

FUZZ = settings(max_examples=NUM_EXAMPLES, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))
ROWS = [
    {"query": "a", "response": "b", "input": "", "prompt": "p", "id": "x"},
    {"question": "é", "answer": "𝄞", "instruction": "i", "output": "o", "input": "z"},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
    {"query": "a\u2028b", "response": MARKUP[0], "prompt": "a\u2028b\x85"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@st.composite
def rows(draw: st.DrawFn, *, as_list: bool) -> bytes:
    """Draw a file of rows, some with unusual values, some not JSON."""
    row = st.one_of(
        st.sampled_from(ROWS).flatmap(with_replaced_values), st.sampled_from(ROWS).map(json.dumps), raw_json()
    )
    found = draw(st.lists(row, max_size=4))
    text = f"[{draw(st.sampled_from([',', ',' + chr(10)])).join(found)}]" if as_list else "\n".join(found)
    mark = draw(st.sampled_from(["", "", "\ufeff"]))
    return draw(damaged((mark + text).encode("utf-8", "surrogatepass"), max_edits=1))


@FUZZ
@given(
    data=st.data(),
    name=st.sampled_from(
        ["rows.json", "rows.jsonl", "rows.json.gz", "rows.jsonl.gz", "rows.parquet", "rows.csv", "rows.gz"]
    ),
    preset=st.sampled_from(["query_response", "question_answer", "instruction", "messages"]),
    malformed=st.sampled_from(["error", "skip"]),
)
def test_rows(folder: Path, data: st.DataObject, name: str, preset: str, malformed: str) -> None:
    content = data.draw(rows(as_list=".json" in name and ".jsonl" not in name))
    if name.endswith(".gz"):
        content = data.draw(damaged(gzip.compress(content, mtime=0), max_edits=1))
    (folder / name).write_bytes(content)
    task = InstructionFiles(train=str(folder / name), preset=preset, malformed=malformed, validation_fraction=0.0)  # type: ignore[arg-type]
    examples = outcome(lambda: task.examples("train"))
    if isinstance(examples, str):
        assert examples.startswith(str(folder / name)), "the message names the file"
        return
    for example in examples:
        for text in (example.query, example.response, *(value for turn in example.messages for value in turn.values())):
            text.encode()
        assert example.response.strip()


@FUZZ
@given(data=st.data(), name=st.sampled_from(["prompts.txt", "prompts.jsonl", "prompts.json"]))
def test_prompts(folder: Path, data: st.DataObject, name: str) -> None:
    (folder / name).write_bytes(data.draw(rows(as_list=False)))
    requests = outcome(lambda: list(read_prompts(str(folder / name))))
    if isinstance(requests, str):
        assert requests.startswith("prompts: ")
        assert str(folder / name) in requests
        return
    for request in requests:
        for text in (request.id, request.prompt, request.reference or ""):
            text.encode()


LINES = [json.dumps({"id": f"{i}é", "response": text}, ensure_ascii=False) + "\n" for i, text in enumerate(MARKUP)]


@FUZZ
@given(num_bytes=st.integers(0, len("".join(LINES).encode())))
def test_a_truncated_predictions_file_keeps_its_complete_lines(folder: Path, num_bytes: int) -> None:
    path = folder / "answers.jsonl"
    path.write_bytes("".join(LINES).encode()[:num_bytes])
    ids = finished_ids(path)
    num_whole = path.read_bytes().count(b"\n")
    assert ids == {f"{i}é" for i in range(num_whole)}
    assert path.read_bytes() == "".join(LINES[:num_whole]).encode()
    assert len("".join(LINES[: num_whole + 1]).encode()) > num_bytes or num_whole == len(LINES)


@FUZZ
@given(num_done=st.integers(1, len(LINES) - 1), num_more=st.integers(0, 99))
def test_a_run_resumes_after_its_last_complete_batch(folder: Path, num_done: int, num_more: int) -> None:
    file = PredictionsFile(folder, "run", {"seed": 0})
    file.write([json.loads(line) for line in LINES[:num_done]])
    file.close()
    with file.path.open("ab") as torn:
        torn.write("".join(LINES[num_done:]).encode()[:num_more])
    again = PredictionsFile(folder, "run", {"seed": 0}, resume=True)
    again.close()
    assert again.done == {f"{i}é" for i in range(num_done)}
    assert again.path.read_bytes() == "".join(LINES[:num_done]).encode()


@FUZZ
@given(content=st.one_of(rows(as_list=False), damaged("".join(LINES).encode())))
def test_predictions_to_resume(folder: Path, content: bytes) -> None:
    path = folder / "other.jsonl"
    path.write_bytes(content)
    ids = outcome(lambda: finished_ids(path))
    assert isinstance(ids, set) or (ids.startswith("output: ") and str(path) in ids)


@FUZZ
@given(
    progress=with_replaced_values({"settings": {"seed": 0, "num_processes": 1}, "num_lines": 2, "state": None}),
    data=st.data(),
)
def test_progress_files_to_resume(folder: Path, progress: str, data: st.DataObject) -> None:
    (folder / "odd.jsonl").write_bytes(data.draw(damaged("".join(LINES).encode(), max_edits=1)))
    (folder / ".odd.progress.json").write_text(progress)
    message = outcome(lambda: PredictionsFile(folder, "odd", {"seed": 0}, resume=True).close())
    assert message is None or message.startswith("resume: ")
