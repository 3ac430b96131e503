"""Soft-tailed masking: how many masks, where, and what targets weigh."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib import SoftTail
from refusion_lit.contrib.card import mask_density
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive
from refusion_lit.types import SpecialTokens

SPECIAL = SpecialTokens(mask_token_id=90, pad_token_id=0, eos_token_ids=(1,), vocab_size=91)


def batch(prompts: list[int], responses: list[int]) -> ResponseBatch:
    width = max(p + r for p, r in zip(prompts, responses, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : prompt + response] = 2 + torch.arange(prompt + response)
    return ResponseBatch(
        input_ids=ids, prompt_lengths=torch.tensor(prompts), response_lengths=torch.tensor(responses),
        sample_keys=torch.arange(len(prompts)),
    )  # fmt: skip


def make_noise(samples: ResponseBatch) -> KeyedNoise:
    return KeyedNoise.for_samples(samples.sample_keys, seed=0, epoch=0)


@settings(max_examples=60, deadline=None)
@given(
    masks=st.lists(st.booleans(), min_size=1, max_size=70), decay=st.sampled_from([0.1, 0.5, 1.0]),
)  # fmt: skip
def test_the_density_is_the_explicit_sum(masks: list[bool], decay: float) -> None:
    counts = [int(m) * (1 + int(i > 0 and masks[i - 1])) for i, m in enumerate(masks)]
    expected = [
        sum(counts[i] * (1 - decay) ** (target - 1 - i) for i in range(target)) for target in range(1, len(masks) + 1)
    ]
    assert mask_density(torch.tensor([masks]), decay)[0].tolist() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=4),
    ratio=st.floats(0.01, 1.0), tail=st.sampled_from([1.0, 1.5, 3.0, 50.0]),
)  # fmt: skip
def test_number_of_masks_in_the_tail(sizes: list[tuple[int, int]], ratio: float, tail: float) -> None:
    samples = batch([p for p, _ in sizes], [r for _, r in sizes])
    ratios = torch.full((len(sizes),), ratio, dtype=torch.float64)
    corrupted = SoftTail(tail=tail).corrupt(samples, make_noise(samples), SPECIAL, mask_ratio=ratios)
    assert corrupted.is_masked is not None
    for row, (prompt, response) in enumerate(sizes):
        num = max(1, int(response * ratio))
        places = corrupted.is_masked[row].nonzero()[:, 0].tolist()
        assert len(places) == num
        assert prompt + response - min(response, int(tail * num)) <= min(places)
        assert max(places) < prompt + response
        assert (corrupted.input_ids[row] == 90).sum() == num
        targets = range(max(prompt, 1), prompt + response)
        labelled = (corrupted.labels[row] != IGNORE_INDEX).nonzero()[:, 0].tolist()
        assert labelled == [target - 1 for target in targets]
        assert [int(corrupted.labels[row, place]) for place in labelled] == [2 + target for target in targets]


def test_a_single_mask_at_the_end_is_next_token_training() -> None:
    samples = batch([3, 2], [9, 4])
    ratio = torch.full((2,), 1e-6, dtype=torch.float64)
    corrupted = SoftTail(tail=1.9).corrupt(samples, make_noise(samples), SPECIAL, mask_ratio=ratio)
    plain = Autoregressive().corrupt(samples, make_noise(samples), SPECIAL)
    # The last token is an input whose own prediction has no target.
    is_read = plain.labels != IGNORE_INDEX
    assert torch.equal(corrupted.input_ids[is_read], plain.input_ids[is_read])
    assert torch.equal(corrupted.labels, plain.labels)
    assert torch.equal(corrupted.weights, plain.weights)
    assert torch.equal(corrupted.counts, plain.counts)


def test_targets_after_masks_weigh_less() -> None:
    samples = batch([2], [4])
    corrupted = SoftTail(tail=1, beta=2.0, decay=0.5).corrupt(
        samples, make_noise(samples), SPECIAL, mask_ratio=torch.tensor([0.5], dtype=torch.float64)
    )
    # Positions 4 and 5 are masks. Targets 2 to 4 have clean tokens before them; target 5 a mask.
    assert corrupted.weights[0].tolist() == pytest.approx([0, 1 / 2, 1 / 2, 1 / 2, 1 / 3, 0])
    assert corrupted.counts.tolist() == pytest.approx([3 / 2 + 1 / 3])


@pytest.mark.parametrize("options", [{"tail": 0.5}, {"beta": 0.0}, {"decay": 0.0}, {"decay": 1.5}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SoftTail(**options)  # type: ignore[arg-type]
