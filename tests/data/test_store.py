"""Encoded examples come back as they went in, from memory and from disk, and only for what they were made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.data import module as module_file
from refusion_lit.data.cache import load_store, save_store, store_key
from refusion_lit.data.encoding import encode_example
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.store import encode_all
from refusion_lit.data.tokenizers import CharacterTokenizer, TrainedBPE
from refusion_lit.tasks import Additions, InstructionFiles
from refusion_lit.types import Example

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
ROWS = [{"query": f"q{i}", "response": "r" * (i + 1)} for i in range(6)]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@given(rows=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8), max_length=st.integers(2, 12))
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[list[int], list[int]]], max_length: int
) -> None:
    examples = [Example(id=f"e{i}", query="", response="") for i in range(len(rows))]
    encode = {f"e{i}": row for i, row in enumerate(rows)}
    store = encode_all(examples, lambda e: encode[e.id], max_length=max_length, skip_malformed=False)
    expected = [(f"e{i}", *row) for i, row in enumerate(rows) if len(row[0]) + len(row[1]) <= max_length]
    assert store.num_too_long == len(rows) - len(expected)
    stores = [store]
    if expected:  # no data module keeps a store of nothing
        folder = tmp_path_factory.mktemp("store") / "below" / "key"
        save_store(store, folder)
        save_store(store, folder)  # what is there stays
        assert [path.name for path in folder.parent.iterdir()] == ["key"]
        stores.append(load_store(folder))
    for kept in stores:
        samples = [kept[i] for i in range(len(kept))]
        assert [(s.id, s.prompt_ids, s.response_ids) for s in samples] == expected
        assert [kept.length(i) for i in range(len(kept))] == [len(s) for s in samples]


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


@pytest.mark.parametrize(
    "other",
    [
        Example(id="2", query="q", response="r"),
        Example(id="1", query="qq", response="r"),
        Example(id="1", query="q", response=""),
        Example(id="1", query="q", response="r", messages=({"role": "user", "content": "q"},)),
    ],
)
def test_keys_depend_on_every_part_of_an_example(other: Example) -> None:
    example = Example(id="1", query="q", response="r")
    assert store_key([example], [1]) == store_key([example], [1])
    assert len({store_key(*args) for args in [([example], [1]), ([other], [1]), ([example], [2]), ([], [1])]}) == 4


class Counting:
    """Stands in for ``encode_example`` and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *args: object, **options: object) -> tuple[list[int], list[int]]:
        self.num_calls += 1
        return encode_example(*args, **options)  # type: ignore[arg-type]


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(module_file, "encode_example", counting)
    return counting


def batches(path: str, cache_dir: Path | None, **options: object) -> list[list[object]]:
    task = InstructionFiles(train=path, validation=path)
    settings = {"batch_size": 2, "tokenizer": CharacterTokenizer(characters="qr0123456789 "), **options}
    data = InstructionDataModule(task, cache_dir=None if cache_dir is None else str(cache_dir), **settings)
    return [[b.ids, b.input_ids.tolist(), b.prompt_lengths.tolist()] for b in data.train_dataloader()]


def test_a_second_run_reads_what_the_first_one_encoded(tmp_path: Path, encoder: Counting) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    without = batches(path, None)
    assert encoder.num_calls == 6
    first = batches(path, tmp_path / "cache")
    assert encoder.num_calls == 12
    second = batches(path, tmp_path / "cache")
    assert encoder.num_calls == 12
    assert without == first == second


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_template": "q{query}"},
        {"tokenizer": CharacterTokenizer(characters="rq0123456789")},
        {"tokenizer": TrainedBPE(vocab_size=300)},
        {"max_length": 8},
        {"malformed": "skip"},
    ],
)
def test_other_options_encode_again(tmp_path: Path, encoder: Counting, options: dict[str, object]) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    batches(path, tmp_path / "cache")
    with_cache = batches(path, tmp_path / "cache", **options)
    assert encoder.num_calls == 12
    assert with_cache == batches(path, None, **options)


def test_a_changed_file_is_encoded_again(tmp_path: Path, encoder: Counting) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    batches(path, tmp_path / "cache")
    write(tmp_path / "rows.jsonl", [*ROWS[:-1], {"query": "q", "response": "qqq"}])
    with_cache = batches(path, tmp_path / "cache")
    assert encoder.num_calls == 12
    assert with_cache == batches(path, None)


@pytest.mark.parametrize("kept", [-5, 0])
@pytest.mark.parametrize("damaged", ["about.json", "tokens.npy", "ends.npy"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, encoder: Counting, damaged: str, kept: int) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    whole = batches(path, tmp_path / "cache")
    (store,) = (tmp_path / "cache").iterdir()
    (store / damaged).write_bytes((store / damaged).read_bytes()[:kept])
    assert batches(path, tmp_path / "cache") == whole
    assert encoder.num_calls == 12
    assert batches(path, tmp_path / "cache") == whole
    assert encoder.num_calls == 12


def test_counts_survive_the_cache(tmp_path: Path) -> None:
    rows = [*ROWS, {"query": "q", "response": "r" * 50}, {"query": "x", "response": "r"}]
    path = write(tmp_path / "rows.jsonl", rows)
    with Path(path).open("a") as file:
        file.write("{broken\n")
    for _ in range(2):
        task = InstructionFiles(train=path, validation_fraction=0, malformed="skip")
        tokenizer = CharacterTokenizer(characters="qr0123456789")
        options = {"batch_size": 1, "max_length": 40, "malformed": "skip", "cache_dir": str(tmp_path / "cache")}
        data = InstructionDataModule(task, tokenizer, **options)
        assert len(data.train_dataloader()) == 6
        assert (data.num_too_long, data.num_malformed) == (1, 2)  # one unknown character, one broken line


def test_generated_tasks_leave_nothing_on_disk(tmp_path: Path) -> None:
    task = Additions(num_train=8, num_validation=2, num_test=2)
    data = InstructionDataModule(task, CharacterTokenizer(), batch_size=2, cache_dir=str(tmp_path / "cache"))
    assert len(list(data.train_dataloader())) == 4
    assert not (tmp_path / "cache").exists()


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


def test_tokens_of_a_loaded_store_stay_on_disk(tmp_path: Path) -> None:
    examples = [Example(id="a", query="", response="")]
    store = encode_all(examples, lambda _: ([1, 2], [3]), max_length=3, skip_malformed=False)
    save_store(store, tmp_path / "store")
    assert isinstance(load_store(tmp_path / "store").tokens, np.memmap)
