"""A run that is broken off and resumed sees the very batches of one that is not, in every epoch and on every rank."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.learning.step import MicroBatch
from refusion_lit.tasks import Additions, InstructionFiles

NUM_BATCHES = 6  # an epoch
NUM_STEPS = 2 * NUM_BATCHES + 2


class Recorder(L.LightningModule):
    """Trains one number and records the epoch and the samples of every batch."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[tuple[int, list[str]]] = []

    def training_step(self, batch: MicroBatch, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.batch.ids))
        return self.weight.sum()

    def on_train_end(self) -> None:
        if self.folder is not None:  # other processes share no memory
            (self.folder / f"rank{self.global_rank}.json").write_text(json.dumps(self.seen))

    def validation_step(self, batch: ResponseBatch, batch_idx: int) -> None:
        """Does nothing; without this method, Lightning would warn of the validation data."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data_module(num_workers: int = 0, **options: int) -> InstructionDataModule:
    task = Additions(num_train=4 * NUM_BATCHES + 1, num_validation=2, num_test=2)
    return InstructionDataModule(task, CharacterTokenizer(), num_workers=num_workers, **{"batch_size": 4, **options})


def fit(
    folder: Path, checkpoint: Path | None = None, data: InstructionDataModule | None = None, **options: object
) -> list[tuple[int, list[str]]]:
    """Train with a checkpoint after every step; return the epoch and the samples of every batch."""
    model = Recorder()
    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"limit_val_batches": 0, **options},
    )
    trainer.fit(model, data or data_module(), ckpt_path=checkpoint)
    return model.seen


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, list[str]]]]:
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, fit(folder)


def test_every_epoch_sees_other_batches_of_the_same_samples(unbroken: tuple[Path, list[tuple[int, list[str]]]]) -> None:
    _, seen = unbroken
    assert [epoch for epoch, _ in seen] == [0] * NUM_BATCHES + [1] * NUM_BATCHES + [2, 2]
    epochs = [[ids for e, ids in seen if e == epoch] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    for batches in epochs:
        assert len({name for ids in batches for name in ids}) == 4 * NUM_BATCHES


@pytest.mark.parametrize("step", range(1, NUM_STEPS))
def test_resuming_after_any_step_changes_nothing(
    unbroken: tuple[Path, list[tuple[int, list[str]]]], tmp_path: Path, step: int
) -> None:
    folder, seen = unbroken
    assert fit(tmp_path, folder / f"step={step}.ckpt") == seen[step:]


@pytest.mark.parametrize(("option", "value"), [("batch_size", 2), ("seed", 5), ("pack_length", 40)])
def test_another_order_is_refused_in_the_middle_of_an_epoch_alone(
    unbroken: tuple[Path, list[tuple[int, list[str]]]], tmp_path: Path, option: str, value: int
) -> None:
    folder, _ = unbroken
    options = {option: value, **({"max_length": value} if option == "pack_length" else {})}
    with pytest.raises(ValueError, match=rf"data\.{option}: .*(\d|None).* got {value}; "):
        fit(tmp_path, folder / "step=3.ckpt", data_module(**options))
    # max_length drops samples here, of which a resumed training warns.
    with pytest.warns(UserWarning, match="data.task") if option == "pack_length" else nullcontext():
        seen = fit(tmp_path, folder / f"step={NUM_BATCHES}.ckpt", data_module(**options))
    assert len(seen) == NUM_STEPS - NUM_BATCHES


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("query,response\n" + "".join(f"{row['query']},{row['response']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _rows(first: int = 0) -> list[dict[str, Any]]:
    """Return the rows of an epoch."""
    return [{"query": f"{n}+{n}", "response": str(2 * n)} for n in range(first, first + 4 * NUM_BATCHES)]


def _change(rows: list[dict[str, Any]], change: str) -> list[dict[str, Any]]:
    """Return rows with another text, in another order, or with one more row."""
    if change == "text":
        return [*rows[:7], {**rows[7], "response": "0"}, *rows[8:]]
    return rows[::-1] if change == "order" else [*rows, {"query": "1+2", "response": "3"}]


def _write_task(folder: Path, source: str, train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> Any:
    """Return a task of rows in memory or in files of some kind."""
    if source == "memory":
        return {"train": train, "validation": validation}
    if source == "two files":
        files = [_write(folder / f"{name}.jsonl", rows) for name, rows in (("a", train[:9]), ("b", train[9:]))]
        return InstructionFiles(train=files, validation=_write(folder / "v.jsonl", validation))
    files = {name: _write(folder / f"{name}.{source}", rows) for name, rows in (("t", train), ("v", validation))}
    return InstructionFiles(train=files["t"], validation=files["v"])


SOURCES = ("jsonl", "csv", "parquet", "two files", "memory")


def _fit_files(folder: Path, checkpoint: Path | None, task: Any, **options: Any) -> list[tuple[int, list[str]]]:
    tokenizer = CharacterTokenizer(characters="0123456789+")
    options = {"batch_size": 4, **options}
    data = InstructionDataModule(task, tokenizer, **options)
    return fit(folder, checkpoint, data, limit_val_batches=1, num_sanity_val_steps=0)


@pytest.mark.parametrize(
    ("source", "change"), [*((source, "text") for source in SOURCES), ("jsonl", "order"), ("memory", "more")]
)
def test_other_training_samples_are_refused_in_mid_epoch_and_named_after_it(
    source: str, change: str, tmp_path: Path
) -> None:
    rows, validation = _rows(), _rows(50)[:3]
    seen = _fit_files(tmp_path / "a", None, _write_task(tmp_path, source, rows, validation))
    changed = _write_task(tmp_path, source, _change(rows, change), validation)
    option = "data.task" if change == "more" else r"data\.task\.train"
    with pytest.raises(ValueError, match=rf"{option}: expected .* with which the epoch began"):
        _fit_files(tmp_path / "r1", tmp_path / "a" / "step=3.ckpt", changed)
    named = {"memory": "a list", "two files": "a.jsonl.*b.jsonl"}.get(source, f"t.{source}")
    with pytest.warns(UserWarning, match=rf"data\.task\.train: .*{named}"):
        _fit_files(tmp_path / "r2", tmp_path / "a" / f"step={NUM_BATCHES}.ckpt", changed)
    same = _write_task(tmp_path, source, rows, validation)
    assert _fit_files(tmp_path / "r3", tmp_path / "a" / "step=3.ckpt", same) == seen[3:]


@pytest.mark.parametrize("source", ["jsonl", "memory"])
def test_other_validation_samples_are_named(source: str, tmp_path: Path) -> None:
    rows, validation = _rows(), _rows(50)[:3]
    seen = _fit_files(tmp_path / "a", None, _write_task(tmp_path, source, rows, validation))
    changed = _write_task(tmp_path, source, rows, _change(validation, "order"))
    with pytest.warns(UserWarning, match=r"data\.task\.validation: .*validation losses"):
        assert _fit_files(tmp_path / "r4", tmp_path / "a" / "step=3.ckpt", changed) == seen[3:]


def test_other_samples_in_packed_rows_are_refused(tmp_path: Path) -> None:
    rows, validation = _rows(), _rows(50)[:3]
    options = {"batch_size": 1, "max_length": 16, "pack_length": 32}
    seen = _fit_files(tmp_path / "a", None, _write_task(tmp_path, "jsonl", rows, validation), **options)
    num_batches = len([epoch for epoch, _ in seen if epoch == 0])
    assert num_batches > 3
    changed = [*rows[:3], {**rows[3], "response": "5"}, *rows[4:]]
    with pytest.raises(ValueError, match=r"data\.task\.train: .*t\.jsonl"):
        _fit_files(
            tmp_path / "r5",
            tmp_path / "a" / "step=3.ckpt",
            _write_task(tmp_path, "jsonl", changed, validation),
            **options,
        )


def test_other_samples_of_a_large_generated_split_are_refused(tmp_path: Path) -> None:
    """Above 20 000 samples a generated split is encoded on access, and its fingerprint covers some samples only."""

    def make_data(seed: int) -> InstructionDataModule:
        task = Additions(num_train=20_001, num_validation=2, num_test=2, seed=seed)
        return InstructionDataModule(task, CharacterTokenizer(), batch_size=4)

    seen = fit(tmp_path / "unbroken", data=make_data(seed=0))
    checkpoint = tmp_path / "unbroken" / "step=3.ckpt"
    with pytest.raises(ValueError, match=r"data\.task: expected the samples with which the epoch began"):
        fit(tmp_path / "other samples", checkpoint, make_data(seed=1))
    assert fit(tmp_path / "same samples", checkpoint, make_data(seed=0)) == seen[3:]


def test_workers_change_neither_batches_nor_resuming(
    unbroken: tuple[Path, list[tuple[int, list[str]]]], tmp_path: Path
) -> None:
    folder, seen = unbroken
    step = NUM_BATCHES + 2
    assert fit(tmp_path, folder / f"step={step}.ckpt", data_module(num_workers=1)) == seen[step:]


def test_packed_rows_are_resumed_too(tmp_path: Path) -> None:
    def data() -> InstructionDataModule:
        task = Additions(num_train=60, num_validation=2, num_test=2)
        return InstructionDataModule(task, CharacterTokenizer(), batch_size=2, max_length=128, pack_length=256)

    seen = fit(tmp_path / "a", data=data())
    first = [ids for epoch, ids in seen if epoch == 0]
    assert len(first) > 2
    assert seen[len(first)][1] != first[0]
    for step in (2, len(first) + 1):
        assert fit(tmp_path / str(step), tmp_path / "a" / f"step={step}.ckpt", data()) == seen[step:]


def test_an_epoch_cut_short_is_resumed_in_the_next_one(tmp_path: Path) -> None:
    seen = fit(tmp_path / "a", limit_train_batches=4)
    for step in (3, 4, 5):
        checkpoint = tmp_path / "a" / f"step={step}.ckpt"
        assert fit(tmp_path / str(step), checkpoint, limit_train_batches=4) == seen[step:]


def test_overfitting_repeats_the_first_batches_also_when_resumed(tmp_path: Path) -> None:
    seen = fit(tmp_path, overfit_batches=2)
    for step in (1, 2, 3):
        assert fit(tmp_path / str(step), tmp_path / f"step={step}.ckpt", overfit_batches=2) == seen[step:]
    assert {str(ids) for _, ids in seen} == {
        str([f"train-{i}" for i in range(4)]),
        str([f"train-{i}" for i in range(4, 8)]),
    }


def test_two_processes_share_each_epoch(tmp_path: Path) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp_fork",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Recorder(tmp_path), data_module())
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [len(seen) for seen in ranks] == [NUM_BATCHES] * 2  # half of an epoch's batches each, for two epochs
    for epoch in range(2):
        names = [name for seen in ranks for e, ids in seen if e == epoch for name in ids]
        assert len(names) == len(set(names)) == 4 * NUM_BATCHES
    assert ranks[0][:3] != ranks[0][3:]
