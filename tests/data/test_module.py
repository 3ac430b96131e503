"""Batches: every sample once, an order that depends on seed and epoch alone, right padding and keys."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.data.batches import LengthGroupedBatches, collate_responses
from refusion_lit.data.examples import EncodedExample
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer, TrainedBPE
from refusion_lit.noise import stable_key
from refusion_lit.tasks import Additions, InstructionFiles


@given(
    num_samples=st.integers(8, 200),
    batch_size=st.integers(1, 4),
    num_ranks=st.integers(1, 2),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_each_sample_once_over_all_ranks(
    num_samples: int, batch_size: int, num_ranks: int, seed: int, epoch: int
) -> None:
    def batches(rank: int) -> list[list[int]]:
        sampler = LengthGroupedBatches(
            num_samples, batch_size, lambda i: i % 7, seed=seed, rank=rank, num_ranks=num_ranks
        )
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        return batches

    ranks = [batches(rank) for rank in range(num_ranks)]
    assert {len(rank_batches) for rank_batches in ranks} == {num_samples // (batch_size * num_ranks)}
    num_uses = Counter(i for rank_batches in ranks for batch in rank_batches for i in batch)
    assert max(num_uses.values()) == 1
    assert num_samples - len(num_uses) < batch_size * num_ranks, "less than a batch for every rank is left out"
    assert ranks == [batches(rank) for rank in range(num_ranks)]


def test_epochs_and_seeds_differ_and_lengths_are_grouped() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = LengthGroupedBatches(160, 10, lambda i: i // 10, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    spreads = [max(i // 10 for i in batch) - min(i // 10 for i in batch) for batch in order(0, 0)]
    assert max(spreads) == 0  # sixteen batches of ten equal lengths, all sorted together


def test_more_ranks_than_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size: .*at most"):
        LengthGroupedBatches(3, 2, None, seed=0, num_ranks=2)


def test_collation_pads_on_the_right() -> None:
    samples = [EncodedExample("a", [5, 6], [7, 1]), EncodedExample("b", [5], [8, 8, 8, 1])]
    batch = collate_responses(samples, pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 0], [5, 8, 8, 8, 1]]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.response_lengths.tolist() == [2, 4]
    assert batch.sample_keys.tolist() == [stable_key("a"), stable_key("b")]


@pytest.mark.parametrize("option", ["batch_size", "eval_batch_size", "max_length", "max_eval_prompts"])
def test_sizes_below_one_are_refused(option: str) -> None:
    task = Additions(num_train=4, num_validation=1, num_test=1)
    for value in (0, -1):
        with pytest.raises(ValueError, match=rf"^data\.{option}: .*at least 1, got {value}"):
            InstructionDataModule(task, CharacterTokenizer(), **{option: value})


@pytest.mark.parametrize("num_train", [40, 30_000], ids=["encoded before training", "encoded when read"])
def test_a_generated_task_from_text_to_batches(num_train: int) -> None:
    task = Additions(num_train=num_train, num_validation=6, num_test=5)
    data = InstructionDataModule(task, CharacterTokenizer(), batch_size=4, eval_batch_size=3)
    batch = next(iter(data.train_dataloader())).batch
    examples = {example.id: example for example in task.examples("train")} if num_train < 100 else {}  # otherwise slow
    for row, length, response_length, identity in zip(
        batch.input_ids, batch.prompt_lengths, batch.response_lengths, batch.ids, strict=True
    ):
        prompt = data.built_tokenizer.decode(row[:length])
        response = data.built_tokenizer.decode(row[length : length + response_length], skip_special_tokens=True)
        question, result = response.split(";")[0].split("=")
        assert eval(question) == int(result)
        if examples:
            assert (prompt, response) == (examples[identity].query, examples[identity].response)
    assert [len(b.ids) for b in data.val_dataloader()] == [3, 3]
    prompts = [p for b in data.test_dataloader() for p in b.prompts]
    assert [p.id for p in prompts] == [e.id for e in task.examples("test")]


def test_workers_change_no_batch() -> None:
    task = Additions(num_train=32, num_validation=4, num_test=4)
    batches = []
    for workers in (0, 1):
        data = InstructionDataModule(task, CharacterTokenizer(), batch_size=8, num_workers=workers)
        batches.append([b.batch.input_ids for b in data.train_dataloader()])
    without, with_worker = batches
    for expected, actual in zip(without, with_worker, strict=True):
        assert torch.equal(actual, expected)


def test_files_with_too_long_and_malformed_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = [
        {"query": "a b", "response": "c" * 10},
        {"query": "x", "response": "y" * 500},
        {"query": "q", "response": "r"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = InstructionFiles(train=str(path), validation=str(path))
    data = InstructionDataModule(task, TrainedBPE(vocab_size=260), batch_size=1, max_length=40)
    assert len(data.train_dataloader()) == 2
    assert re.search("train: 1 of 3 .*longer than 40 tokens, 0 .*malformed", caplog.text)
    with pytest.raises(ValueError, match=r"max_length: .*train"):
        InstructionDataModule(task, TrainedBPE(vocab_size=260), max_length=1).train_dataloader()
    skipping = replace(task, malformed="skip")
    unknown = InstructionDataModule(skipping, CharacterTokenizer(characters="ab cqr"), batch_size=1)
    assert len(unknown.train_dataloader()) == 2
    assert re.search("longer than 512 tokens, 1 .*malformed", caplog.text)
    with pytest.raises(ValueError, match="no token for 'x'"):
        InstructionDataModule(task, CharacterTokenizer(characters="ab cqr"), batch_size=1).train_dataloader()


def test_validation_samples_that_are_trained_are_named_once(tmp_path: Path) -> None:
    paths = [tmp_path / "train.jsonl", tmp_path / "other.jsonl"]
    rows = [{"query": f"{i}", "response": f"{i}"} for i in range(6)]
    for path, part in zip(paths, (rows[:4], rows[2:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    train, other = map(str, paths)
    for validation, expected in ((train, "4 of 4"), (other, "2 of 4"), (None, "")):
        task = InstructionFiles(train=train, validation=validation, validation_fraction=0.5)
        data = InstructionDataModule(task, TrainedBPE(vocab_size=260), batch_size=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data.warn_of_shared_samples()
        assert len(caught) == bool(expected)
        for warning in caught:
            assert "data.task.validation" in str(warning.message)
            assert expected in str(warning.message)


def test_impossible_options_are_refused() -> None:
    task = Additions(num_train=4, num_validation=2, num_test=2)
    with pytest.raises(ValueError, match=r"data\.batch_size"):
        InstructionDataModule(task, CharacterTokenizer(), batch_size=0)
    with pytest.raises(ValueError, match="prompt_template"):
        InstructionDataModule(task, CharacterTokenizer(), prompt_template="none")
