"""``SerialHybrid``: a complete prefix, then one serial block with masked slots, and nothing after it."""

from __future__ import annotations

import pytest
import torch
from experiments.refusion_pays.serial import SerialHybrid
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid
from refusion_lit.types import SpecialTokens

MASK, PAD = 1, 0
SPECIAL = SpecialTokens(mask_token_id=MASK, pad_token_id=PAD, eos_token_ids=(2,), vocab_size=1000)


def make_batch(sizes: list[tuple[int, int]], seed: int) -> ResponseBatch:
    """Return a batch in which every token is another one."""
    width = max(prompt + response for prompt, response in sizes)
    ids = torch.full((len(sizes), width), PAD)
    for row, (prompt, response) in enumerate(sizes):
        ids[row, : prompt + response] = 10 + 100 * row + torch.arange(prompt + response)
    prompts, responses = torch.tensor(sizes).T
    return ResponseBatch(
        input_ids=ids, prompt_lengths=prompts, response_lengths=responses, sample_keys=torch.arange(len(sizes)) + seed
    )


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=4),
    slot_size=st.integers(1, 6),
    block_size=st.integers(1, 20),
    seed=st.integers(0, 10_000),
)
def test_a_row_is_a_prefix_and_a_block(
    sizes: list[tuple[int, int]], slot_size: int, block_size: int, seed: int
) -> None:
    batch = make_batch(sizes, seed)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    corrupted = SerialHybrid(slot_sizes=(slot_size,), block_size=block_size).corrupt(batch, noise, SPECIAL)
    assert corrupted.is_real is not None
    assert corrupted.is_masked is not None
    slots_per_block = max(block_size // slot_size, 1)
    for row, (prompt, response) in enumerate(sizes):
        length = int(corrupted.is_real[row].sum())
        assert corrupted.is_real[row, :length].all()
        positions = corrupted.position_ids[row, :length]
        assert sorted(positions.tolist()) == list(range(length)), "position ids have no gaps"
        assert length == prompt + response or (length - prompt) % slot_size == 0
        tokens, masked, labels = (
            values[row, :length] for values in (corrupted.input_ids, corrupted.is_masked, corrupted.labels)
        )
        original = batch.input_ids[row][positions]
        assert torch.equal(tokens, torch.where(masked, MASK, original))
        assert torch.equal(labels[masked], original[masked])
        assert (corrupted.labels[row, length:] == IGNORE_INDEX).all()
        # All masked slots lie in the block. The slots before the block lead the sequence, in text order.
        slots = (positions[prompt:] - prompt) // slot_size
        num_slots = -(-(length - prompt) // slot_size)
        block = range(max(num_slots - slots_per_block, 0), num_slots)
        assert {int(slot) for slot in slots[masked[prompt:]]} <= {*block}
        prefix_slots = [int(slot) for slot in slots if slot < block.start]
        assert prefix_slots == sorted(prefix_slots), "the prefix is in text order"
        assert slots[: len(prefix_slots)].tolist() == prefix_slots


def test_text_after_the_block_is_left_out() -> None:
    batch = make_batch([(4, 200)] * 16, 3)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    corrupted = SerialHybrid(slot_sizes=(4,), block_size=16).corrupt(batch, noise, SPECIAL)
    assert corrupted.is_real is not None
    share = float(corrupted.is_real.sum()) / (16 * 204)
    assert 0.3 < share < 0.8  # on average the prompt, half of the response, and the block


def test_a_given_ratio_masks_as_hybrid_does() -> None:
    batch = make_batch([(4, 30), (2, 17)], 5)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    ratio = torch.tensor([0.4, 0.9])
    serial, hybrid = (
        cls(slot_sizes=(4,)).corrupt(batch, noise, SPECIAL, mask_ratio=ratio) for cls in (SerialHybrid, Hybrid)
    )
    assert torch.equal(serial.input_ids, hybrid.input_ids)
    assert torch.equal(serial.weights, hybrid.weights)


def test_a_block_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^objective\.block_size: expected an integer of at least 1, got 0"):
        SerialHybrid(block_size=0)
