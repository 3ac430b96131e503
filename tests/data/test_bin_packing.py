"""Rows of several samples: each sample once, none too long, little padding, the same for any workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.data.batches import collate_packed
from refusion_lit.data.datasets import pack_samples
from refusion_lit.data.examples import EncodedExample
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.tasks import Additions


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), spare=st.integers(0, 30), seed=st.integers(0, 3))
def test_each_sample_once_and_no_row_too_long(lengths: list[int], spare: int, seed: int) -> None:
    row_length = 20 + spare  # the longest sample fits
    rows = pack_samples(lengths, row_length, seed=seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < load <= row_length for load in loads)
    assert rows == pack_samples(lengths, row_length, seed=seed)
    # Best fit never opens a row while another has room: no two rows fit in one.
    smallest = sorted(loads)[:2]
    assert len(smallest) < 2 or sum(smallest) > row_length


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000))
def test_padding_is_under_five_percent_on_lengths_like_gsm8k(seed: int) -> None:
    """Log-normal with the median and spread of GSM8K's questions with answers in a BPE of 4096 tokens."""
    normal = torch.randn(6000, generator=torch.Generator().manual_seed(seed))
    lengths = (150 * (0.36 * normal).exp()).long().clamp(40, 512).tolist()
    rows = pack_samples(lengths, 512, seed=seed)
    assert 1 - sum(lengths) / (512 * len(rows)) < 0.05
    assert rows != pack_samples(lengths, 512, seed=seed + 1)


def test_a_batch_holds_the_samples_of_its_rows() -> None:
    samples = [EncodedExample(f"s{i}", [5] * i, [6, 1]) for i in range(4)]
    batch = collate_packed([[samples[0], samples[2]], [samples[3]]], pad_token_id=0)
    assert batch.ids == ["s0", "s2", "s3"]
    assert batch.rows is not None
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.prompt_lengths.tolist() == [0, 2, 3]


@pytest.mark.parametrize("num_train", [60, 2000], ids=["encoded before training", "encoded when read"])
def test_the_data_module_packs_training_batches_alone(num_train: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refusion_lit.data.module._LAZY_ABOVE", 1000)
    task = Additions(num_train=num_train, num_validation=4, num_test=4)
    data = InstructionDataModule(task, CharacterTokenizer(), batch_size=3, max_length=128, pack_length=256)
    loader = data.train_dataloader()
    ids: list[str] = []
    for micro_batch in loader:
        batch = micro_batch.batch
        assert batch.rows is not None
        lengths = torch.zeros(3, dtype=torch.long)
        lengths.index_add_(0, batch.rows, batch.ends)
        assert lengths.max() <= 256
        ids += batch.ids
        if len(ids) > 500:
            break
    assert len(ids) == len(set(ids))
    assert len(ids) > (40 if num_train == 60 else 500)  # the last batch of an epoch, if it is short, is left out
    assert next(iter(data.val_dataloader())).rows is None


def test_a_row_shorter_than_a_sample_may_be_is_refused() -> None:
    task = Additions(num_train=4, num_validation=2, num_test=2)
    with pytest.raises(ValueError, match=r"data\.pack_length: .*512, got 100"):
        InstructionDataModule(task, CharacterTokenizer(), pack_length=100)
