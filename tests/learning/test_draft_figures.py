"""Acceptance of drafts, counted slot by slot in a plain loop."""

from __future__ import annotations

import pytest
import torch
from experiments.refusion_pays.serial import SerialHybrid

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.draft_figures import NUM_OFFSETS, THRESHOLD, draft_figures
from refusion_lit.learning.packing import pack
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Hybrid, Masked, MaskWindows, Objective
from refusion_lit.types import SpecialTokens

SPECIAL = SpecialTokens(mask_token_id=1, pad_token_id=0, eos_token_ids=(2,), vocab_size=12)
OBJECTIVES: list[Objective] = [
    Hybrid(slot_sizes=(2, 3), chunk_size=7),
    SerialHybrid(slot_sizes=(3,), block_size=9),
    MaskWindows(window=4),
    MaskWindows(window=5, num_tilings=1),
]


def corrupt_batch(objective: Objective) -> tuple[CorruptedBatch, torch.Tensor]:
    prompts, responses = torch.tensor([(2, 19), (3, 17), (1, 1), (4, 12)]).T
    ids = torch.randint(3, 12, (4, 21), generator=torch.Generator().manual_seed(1))
    batch = ResponseBatch(
        input_ids=ids, prompt_lengths=prompts, response_lengths=responses, sample_keys=torch.arange(4)
    )
    corrupted = objective.corrupt(batch, KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0), SPECIAL)
    return corrupted, torch.tensor([0, 1, 1, 1])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_counts_equal_those_of_a_plain_loop(objective: Objective, is_packed: bool) -> None:
    corrupted, rows = corrupt_batch(objective)
    corrupted = pack(corrupted, rows, pad_token_id=0) if is_packed else corrupted
    offsets, masked = corrupted.draft_offsets, corrupted.is_masked
    assert offsets is not None
    assert masked is not None
    assert torch.equal(offsets >= 0, masked)
    # Some 85 % of the drafts are probably right.
    logits = 3 * torch.randn(*offsets.shape, 12, generator=torch.Generator().manual_seed(2))
    favourite = torch.rand(offsets.shape, generator=torch.Generator().manual_seed(3)) < 0.85
    logits[favourite] += 4 * torch.nn.functional.one_hot(corrupted.labels.clamp(min=0), 12)[favourite]
    head = torch.nn.Identity()
    with torch.no_grad():
        actual = objective.loss(logits, head, corrupted).draft_counts
    assert actual is not None
    expected = torch.zeros(NUM_OFFSETS, 4, dtype=torch.float64)
    for row in range(len(offsets)):
        accepted = True
        for i in masked[row].nonzero().flatten().tolist():
            offset = int(offsets[row, i])
            if offset == 0:
                start = int(corrupted.position_ids[row, i])
                accepted = True
            assert int(corrupted.position_ids[row, i]) == start + offset
            right = int(logits[row, i].argmax()) == int(corrupted.labels[row, i])
            confident = float(logits[row, i].softmax(-1).max()) > THRESHOLD
            accepted &= right
            if offset < NUM_OFFSETS:
                expected[offset] += torch.tensor([1, accepted, confident, confident and right])
    torch.testing.assert_close(actual, expected)
    assert expected[0, 0] > 0
    assert objective.loss(logits.requires_grad_(), head, corrupted).draft_counts is None, "training counts nothing"


def test_figures() -> None:
    # Drafts, accepted ones, confident ones, and those that are confident and right, at the slots' first two offsets.
    counts = torch.zeros(NUM_OFFSETS, 4, dtype=torch.float64)
    counts[0] = torch.tensor([10.0, 8.0, 5.0, 5.0])
    counts[1] = torch.tensor([10.0, 4.0, 3.0, 1.0])
    actual = {name: float(value) for name, value in draft_figures(counts).items()}
    expected = {"accepted_1": 8 / 10, "accepted_2": 4 / 10, "confident": (5 + 3) / 20, "agreement": (5 + 1) / (5 + 3)}
    assert actual == expected


def test_objectives_without_slots_count_nothing() -> None:
    corrupted, _ = corrupt_batch(Masked())
    hidden = torch.zeros(*corrupted.input_ids.shape, 12)
    with torch.no_grad():
        assert Masked().loss(hidden, torch.nn.Identity(), corrupted).draft_counts is None
