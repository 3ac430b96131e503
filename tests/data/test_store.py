"""Encoded examples come back as they went in; malformed and too long ones are counted or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from refusion_lit.data import module as module_file
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.tasks import Additions, InstructionFiles

ROWS = [{"query": f"q{i}", "response": "r" * (i + 1)} for i in range(6)]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_data(folder: Path, rows: list[dict[str, str]], **options: Any) -> InstructionDataModule:
    """Return a data module over rows."""
    task = InstructionFiles(train=write(folder / "rows.jsonl", rows), validation_fraction=0, **options)
    return InstructionDataModule(task, CharacterTokenizer(characters="qr0123456789"), batch_size=1)


def batch_texts(data: InstructionDataModule, batch: ResponseBatch) -> list[tuple[str, str]]:
    """Return prompts and responses of a batch, decoded, without their ends of sequence."""
    decode = data.built_tokenizer.decode
    lengths = zip(batch.input_ids, batch.prompt_lengths, batch.response_lengths, strict=True)
    return [(decode(ids[:prompt]), decode(ids[prompt : prompt + response - 1])) for ids, prompt, response in lengths]


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    data = make_data(tmp_path, ROWS)
    samples = [sample for batch in data.train_dataloader() for sample in batch_texts(data, batch.batch)]
    assert sorted(samples) == [(row["query"], row["response"]) for row in ROWS]


def test_malformed_examples_are_raised_or_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = [*ROWS, {"query": "unknown", "response": "r"}]
    data = make_data(tmp_path, rows, malformed="skip")
    assert len(data.train_dataloader()) == len(ROWS)
    assert re.search("1 .*malformed", caplog.text)
    with pytest.raises(ValueError, match="no token for"):
        make_data(tmp_path, rows).train_dataloader()


def test_large_files_are_encoded_beforehand_and_too_long_samples_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module_file, "_LAZY_ABOVE", 3)
    path = write(tmp_path / "rows.jsonl", ROWS)
    task = InstructionFiles(train=path, validation_fraction=0)
    data = InstructionDataModule(task, CharacterTokenizer(characters="qr0123456789"), batch_size=1, max_length=6)
    assert len(data.train_dataloader()) == 3
    assert re.search("3 of 6 .*longer than 6 tokens", caplog.text)


def test_a_lazy_task_with_too_long_samples_is_refused() -> None:
    task = Additions(num_train=20_001, num_validation=2, num_test=2)
    data = InstructionDataModule(task, CharacterTokenizer(), max_length=10)
    with pytest.raises(ValueError, match=r"data\.max_length: .*10 tokens.* train-\d+, got \d+"):
        next(iter(data.train_dataloader()))


def test_the_context_of_one_model_does_not_limit_the_samples_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_file, "_LAZY_ABOVE", 3)
    data = InstructionDataModule(Additions(num_train=8, num_validation=8, num_test=2), CharacterTokenizer())
    data.check_context(4)
    with pytest.raises(ValueError, match=r"data.max_length: .*at most 4 tokens"):
        data._load_split("train")[0]
    data.check_context(256)
    assert len(data._load_split("train")[0]) > 4
