"""Arbitrary data, prompt and predictions files are read or refused with a clear error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardness.malformed import MARKUP, NUM_EXAMPLES, PHASES, damaged_files, outcome, raw_json, with_replaced_values
from refusion_lit.cli.generate import read_prompts
from refusion_lit.evaluation.predictions import PredictionsFile
from refusion_lit.tasks import InstructionFiles
from refusion_lit.utils.files import meta_path

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
    rows = draw(st.lists(row, max_size=4))
    text = f"[{draw(st.sampled_from([',', ',' + chr(10)])).join(rows)}]" if as_list else "\n".join(rows)
    mark = draw(st.sampled_from(["", "", "\ufeff"]))
    return draw(damaged_files((mark + text).encode("utf-8", "surrogatepass"), max_edits=1))


@FUZZ
@given(
    data=st.data(),
    name=st.sampled_from(["rows.json", "rows.jsonl", "rows.json.gz", "rows.jsonl.gz", "rows.csv", "rows.gz"]),
    preset=st.sampled_from(["query_response", "question_answer", "instruction", "messages"]),
    malformed=st.sampled_from(["error", "skip"]),
)
def test_rows(folder: Path, data: st.DataObject, name: str, preset: str, malformed: str) -> None:
    content = data.draw(rows(as_list=".json" in name and ".jsonl" not in name))
    if name.endswith(".gz"):
        content = data.draw(damaged_files(gzip.compress(content, mtime=0), max_edits=1))
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
FINGERPRINT = {"prompts": {"num_prompts": len(LINES), "digest": "d"}, "weights": None}
META = {"fingerprint": FINGERPRINT, "progress": {"num_lines": 2, "state": None}}


@FUZZ
@given(num_done=st.integers(1, len(LINES) - 1), num_more=st.integers(0, 99))
def test_a_run_resumes_after_its_last_complete_batch(folder: Path, num_done: int, num_more: int) -> None:
    path = folder / "run.jsonl"
    file = PredictionsFile(path, FINGERPRINT)
    file.write([json.loads(line) for line in LINES[:num_done]])
    file.close()
    with path.open("ab") as torn:
        torn.write("".join(LINES[num_done:]).encode()[:num_more])
    again = PredictionsFile(path, FINGERPRINT, resume=True)
    again.close()
    assert again.done == {f"{i}é" for i in range(num_done)}
    assert path.read_bytes() == "".join(LINES[:num_done]).encode()


@FUZZ
@given(content=st.one_of(rows(as_list=False), damaged_files("".join(LINES).encode())))
def test_predictions_to_resume(folder: Path, content: bytes) -> None:
    path = folder / "odd.jsonl"
    path.write_bytes(content)
    meta_path(path).write_text(json.dumps(META))
    message = outcome(lambda: PredictionsFile(path, FINGERPRINT, resume=True).close())
    if message is None:
        lines = path.read_bytes().split(b"\n")
        assert lines[:-1] == content.split(b"\n")[:2]
        assert all("id" in json.loads(line) for line in lines[:-1])
    else:
        assert message.startswith("resume: ")
        assert str(path) in message
        assert path.read_bytes() == content


@FUZZ
@given(meta=with_replaced_values(META), data=st.data())
def test_fingerprints_to_resume(folder: Path, meta: str, data: st.DataObject) -> None:
    path, content = folder / "odd.jsonl", data.draw(damaged_files("".join(LINES).encode(), max_edits=1))
    path.write_bytes(content)
    meta_path(path).write_text(meta)
    message = outcome(lambda: PredictionsFile(path, FINGERPRINT, resume=True).close())
    assert content.startswith(path.read_bytes())
    if message is not None:
        assert message.startswith("resume: ")
        assert path.read_bytes() == content
        assert meta_path(path).read_text() == meta
