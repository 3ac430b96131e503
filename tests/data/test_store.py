"""Encoded examples come back as they went in; malformed and too long ones are counted or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.data import module as module_file
from refusion_lit.data.examples import encode_all
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.tasks import Additions, InstructionFiles
from refusion_lit.types import Example

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
ROWS = [{"query": f"q{i}", "response": "r" * (i + 1)} for i in range(6)]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@given(rows=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8), max_length=st.integers(2, 12))
def test_what_goes_in_comes_out(rows: list[tuple[list[int], list[int]]], max_length: int) -> None:
    examples = [Example(id=f"e{i}", query="", response="") for i in range(len(rows))]
    encode = {f"e{i}": row for i, row in enumerate(rows)}
    store = encode_all(examples, lambda e: encode[e.id], max_length=max_length, skip_malformed=False)
    expected = [(f"e{i}", *row) for i, row in enumerate(rows) if len(row[0]) + len(row[1]) <= max_length]
    assert store.num_too_long == len(rows) - len(expected)
    samples = [store[i] for i in range(len(store))]
    assert [(s.id, s.prompt_ids, s.response_ids) for s in samples] == expected
    assert [store.length(i) for i in range(len(store))] == [len(s) for s in samples]


def test_malformed_examples_are_raised_or_counted() -> None:
    def encode(example: Example) -> tuple[list[int], list[int]]:
        if example.id == "bad":
            raise ValueError("bad")
        return [1], [2]

    examples = [Example(id=name, query="", response="") for name in ("good", "bad", "fine")]
    store = encode_all(examples, encode, max_length=2, skip_malformed=True)
    assert (store.ids, store.num_malformed) == (["good", "fine"], 1)
    with pytest.raises(ValueError, match="bad"):
        encode_all(examples, encode, max_length=2, skip_malformed=False)


def test_large_files_are_encoded_beforehand_and_too_long_samples_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_file, "_LAZY_ABOVE", 3)
    path = write(tmp_path / "rows.jsonl", ROWS)
    task = InstructionFiles(train=path, validation_fraction=0)
    data = InstructionDataModule(task, CharacterTokenizer(characters="qr0123456789"), batch_size=1, max_length=6)
    assert len(data.train_dataloader()) == 3
    assert data.num_too_long == 3


def test_a_lazy_task_with_too_long_samples_is_refused() -> None:
    task = Additions(num_train=20_001, num_validation=2, num_test=2)
    data = InstructionDataModule(task, CharacterTokenizer(), max_length=10)
    with pytest.raises(
        ValueError, match=r"data\.max_length: expected at most 10 tokens in the sample train-\d+, got \d+"
    ):
        next(iter(data.train_dataloader()))
