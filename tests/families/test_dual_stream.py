"""The dual-stream objective against a slow reference and against WeDLM, its decoder.

A row has two copies of the text: the prediction stream, in which the masked tokens of a block follow its clean tokens,
and the memory stream, which is clean and in text order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from refusion_lit.decoding import WeDLM, decode
from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import DualStream
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from support.fakes import MASK as FAKE_MASK
from support.fakes import SPECIAL, tiny_backbone

MASK = 2
MakeBatch = Callable[..., ResponseBatch]
Noise = Callable[..., KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (8, 8), (5, 4), (2, 16)]


@pytest.mark.parametrize("ratio", [None, 0.25, 1.0])
@pytest.mark.parametrize("size", [1, 4, 32])
def test_equals_the_slow_reference(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens, ratio: float | None, size: int,
) -> None:  # fmt: skip
    batch = make_batch(LENGTHS, width=20)
    noise = make_noise(batch)
    ratios = None if ratio is None else torch.full((len(LENGTHS),), ratio)
    corrupted = DualStream(block_size=size).corrupt(batch, noise, special_tokens, mask_ratio=ratios)
    gammas, order = noise.uniform("block_ratio", 20).tolist(), noise.bits("token_order", 64).tolist()
    total_weight, num_following = 0.0, 0
    for row, (prompt, response) in enumerate(LENGTHS):
        length = prompt + response
        text = batch.input_ids[row, :length].tolist()
        padding = batch.input_ids[row, length:].tolist()
        prediction: list[tuple[int, int, int, float]] = []  # token, position, label, weight
        for start in range(0, length, size):
            block = range(start, min(start + size, length))
            gamma = ratio or gammas[row][start // size]
            maskable = [place for place in block if place >= prompt]
            masked = sorted(maskable, key=lambda place: order[row][place])[: round(len(maskable) * gamma)]
            weight = 1 / gamma
            prediction += [(text[place], place, IGNORE_INDEX, 0.0) for place in block if place not in masked]
            prediction += [(MASK, place, text[place], weight) for place in sorted(masked)]
            total_weight += weight * len(masked)
        tokens, places, labels, weights = (list(values) for values in zip(*prediction, strict=True))
        following = [text[i + 1] if i + 1 >= prompt else IGNORE_INDEX for i in range(length - 1)]
        num_following += sum(label != IGNORE_INDEX for label in following)
        ignored = [IGNORE_INDEX] * len(padding)
        assert corrupted.input_ids[row].tolist() == tokens + padding + text + padding
        assert corrupted.position_ids[row].tolist() == [*places, *range(length, 20), *range(20)]
        assert corrupted.labels[row].tolist() == [*labels, *ignored, *following, IGNORE_INDEX, *ignored]
        assert corrupted.weights[row, :20].tolist() == pytest.approx(weights + [0.0] * len(padding))
        assert corrupted.is_masked is not None
        assert corrupted.is_masked[row].nonzero()[:, 0].tolist() == [i for i, t in enumerate(labels) if t >= 0]
    assert corrupted.counts.tolist() == pytest.approx([total_weight, num_following])


@pytest.mark.parametrize(("num_tokens", "block_size"), [(12, 4), (6, 1), (8, 8), (6, 4)])
def test_streams_are_causal_and_masks_see_earlier_clean_blocks(num_tokens: int, block_size: int) -> None:
    def is_visible(query: int, key: int) -> bool:
        query_place, key_place = query % num_tokens, key % num_tokens
        query_block, key_block = query_place // block_size, key_place // block_size
        from_memory, to_memory = query >= num_tokens, key >= num_tokens
        if from_memory:
            return to_memory and key_place <= query_place
        if to_memory:
            return key_block < query_block
        return key_block == query_block and key_place <= query_place

    lengths = [num_tokens, block_size]
    mask = ranges_mask(three_part_ranges(num_tokens, block_size, torch.tensor(lengths), causal=True), 2 * num_tokens)
    for row, length in enumerate(lengths):
        for query, key in product(range(2 * num_tokens), repeat=2):
            if query != key:
                is_text = key % num_tokens < length
                assert mask[row, query, key].item() == (is_text and is_visible(query, key))


@pytest.mark.parametrize("num_known", [1, 3, 9, 16])
def test_masks_are_predicted_as_in_training(num_known: int) -> None:
    """A block whose response tokens are all masked gives the probabilities of the decoder's first forward."""
    size = 8
    num_new = size - num_known % size
    generator = torch.Generator().manual_seed(num_known)
    prompt = torch.randint(3, 14, (num_known,), generator=generator).tolist()
    objective = DualStream(block_size=size)
    model = tiny_backbone(objective.traits)
    sampling = SamplingParams(max_new_tokens=num_new)
    requests = [Prompt(token_ids=tuple(prompt), id="p")]
    [row] = decode(model, WeDLM(window_size=num_new), requests, sampling, trace=True).rows
    first = row.trace[0]

    clean = ResponseBatch(
        input_ids=torch.tensor([prompt + [3] * num_new]),
        prompt_lengths=torch.tensor([num_known]),
        response_lengths=torch.tensor([num_new]),
        sample_keys=torch.tensor([1]),
    )
    noise = KeyedNoise.for_samples(clean.sample_keys, seed=0, epoch=0)
    corrupted = objective.corrupt(clean, noise, SPECIAL, mask_ratio=torch.ones(1))
    assert corrupted.is_masked is not None
    assert (corrupted.input_ids[corrupted.is_masked] == FAKE_MASK).all()
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        probabilities = model.logits(hidden[corrupted.is_masked]).softmax(-1)
    drafts = torch.tensor(first.tokens)
    assert first.positions == list(range(num_known, num_known + num_new))
    assert first.probabilities == pytest.approx(probabilities.gather(-1, drafts[:, None])[:, 0].tolist(), abs=1e-10)


def test_the_total_mixes_both_terms() -> None:
    assert DualStream().terms == {"mdm": 0.5, "ar": 0.5}
    assert DualStream(ar_weight=0.0).terms == {"mdm": 1.0, "ar": 0.0}
    assert DualStream(ar_weight=3.0).terms == {"mdm": 0.25, "ar": 0.75}


@pytest.mark.parametrize("options", [{"block_size": 0}, {"ar_weight": -1.0}])
def test_impossible_options_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ValueError, match=f"objective.{next(iter(options))}"):
        DualStream(**options)


def test_traits() -> None:
    assert DualStream().traits == ModelTraits(attention="causal", predictions=("mask", "next_token"))
