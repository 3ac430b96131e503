"""Block diffusion against slow references and the invariants of its specification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked, Masked
from refusion_lit.types import ModelTraits, SpecialTokens
from support.attention_masks import attention_mask

PAD, EOS, MASK = 0, 1, 2
MakeBatch = Callable[..., ResponseBatch]
Noise = Callable[..., KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (8, 8), (5, 4), (2, 16)]


def slow_block_ratios(
    prompt: int, length: int, size: int, order: list[float], uniform: list[float]
) -> dict[int, float]:
    """Return the mask ratio t in [0, 1) of every block with response tokens.

    [0, 1) is divided into as many strata as there are blocks; a block draws from the stratum of its rank in a random
    order.

    Args:
        prompt: Length of the prompt.
        length: Length of prompt and response.
        size: Size of a block.
        order: A random number for each block, by which blocks are ranked.
        uniform: A random number for each block, its place in the stratum.
    """
    blocks = list(range(prompt // size, (length - 1) // size + 1))
    ranks = {block: rank for rank, block in enumerate(sorted(blocks, key=lambda block: order[block]))}
    return {block: (ranks[block] + uniform[block]) / len(blocks) for block in blocks}


@pytest.mark.parametrize("ratio", [None, 0.25, 1.0])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("complementary", [False, True])
@pytest.mark.parametrize("fill", ["eos", "mask"])
@pytest.mark.parametrize(
    ("block_size", "t_min", "t_max"), [(4, 1e-3, 1.0), (4, 0.45, 0.95), (1, 0.6, 0.6), (32, 0.2, 1.0)]
)
def test_equals_the_slow_reference(
    make_batch: MakeBatch,
    make_noise: Noise,
    special_tokens: SpecialTokens,
    ratio: float | None,
    shifted: bool,
    complementary: bool,
    fill: Literal["eos", "mask"],
    block_size: int,
    t_min: float,
    t_max: float,
) -> None:
    batch = make_batch(LENGTHS, width=23)
    noise = make_noise(batch)
    objective = BlockMasked(
        block_size=block_size,
        t_min=t_min,
        t_max=t_max,
        shifted=shifted,
        complementary=complementary,
        fill_blocks_with=fill,
    )
    ratios = None if ratio is None else torch.full((len(LENGTHS),), ratio)
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=ratios)
    token_noise, order, block_noise = (
        noise.uniform(stream, 40).tolist() for stream in ("token_mask", "block_stratum", "block_ratio")
    )

    width = corrupted.input_ids.shape[1] // 2
    num_targets = 0
    assert corrupted.is_masked is not None
    for row, (prompt, response) in enumerate(LENGTHS):
        text = list(range(10, 10 + prompt + response))
        num_filled = -len(text) % block_size  # up to a whole number of blocks
        text += [EOS if fill == "eos" else MASK] * num_filled
        length = len(text) if fill == "eos" else prompt + response
        t = slow_block_ratios(prompt, length, block_size, order[row], block_noise[row])
        p = {block: ratio or value * (t_max - t_min) + t_min for block, value in t.items()}
        first = [place for place in range(prompt, length) if token_noise[row][place] < p[place // block_size]]
        views = [first]
        if complementary:
            views.append([place for place in range(prompt, length) if place not in first])
        num_targets += length - prompt
        for view, masked in enumerate(views):
            result = row + view * len(LENGTHS)
            labels, weights = [IGNORE_INDEX] * 2 * width, [0.0] * 2 * width
            for place in masked:
                probability = p[place // block_size]
                unweighted = complementary or (ratio is None and t_min > 0.5)
                target = place - shifted
                if target >= 0:
                    labels[target], weights[target] = text[place], 1.0 if unweighted else 1 / probability
                elif complementary:  # nothing before a text without prompt predicts its first token
                    num_targets -= 1
            noisy = [MASK if place in masked else token for place, token in enumerate(text)]
            padding = [PAD] * (width - len(text))
            assert corrupted.input_ids[result].tolist() == noisy + padding + text + padding
            assert corrupted.position_ids[result].tolist() == 2 * list(range(width))
            assert corrupted.labels[result].tolist() == labels
            assert corrupted.weights[result].tolist() == pytest.approx(weights, rel=1e-5)
            assert corrupted.is_masked[result].nonzero()[:, 0].tolist() == masked
    assert corrupted.counts.tolist() == [num_targets]
    assert len(corrupted.input_ids) == len(LENGTHS) * (1 + complementary)
    assert corrupted.num_views == 1 + complementary


@pytest.mark.parametrize(("num_tokens", "block_size"), [(12, 4), (6, 1), (8, 8), (6, 4)])
def test_mask_follows_the_three_rules(num_tokens: int, block_size: int) -> None:
    """A row holds a noisy and a clean copy of the text.

    All tokens see their own block in their own copy; noisy blocks see clean blocks before them; clean blocks see clean
    blocks up to their own.
    """
    lengths = [num_tokens, block_size]
    mask = ranges_mask(three_part_ranges(num_tokens, block_size, torch.tensor(lengths)), 2 * num_tokens)
    for row, length in enumerate(lengths):
        for query in range(2 * num_tokens):
            for key in range(2 * num_tokens):
                query_block, key_block = query % num_tokens // block_size, key % num_tokens // block_size
                query_clean, key_clean = query >= num_tokens, key >= num_tokens
                allowed = query_clean == key_clean and query_block == key_block
                allowed |= not query_clean and key_clean and query_block > key_block
                allowed |= query_clean and key_clean and query_block >= key_block
                allowed &= key % num_tokens < length
                assert mask[row, query, key].item() == (allowed or query == key)


def test_no_path_leads_from_a_clean_token_to_its_own_noisy_block() -> None:
    """Through any number of layers a noisy block depends only on itself and on earlier clean blocks.

    Otherwise the answer would leak into training.
    """
    num_tokens, size = 12, 3
    mask = ranges_mask(three_part_ranges(num_tokens, size, torch.tensor([num_tokens])), 2 * num_tokens)[0]
    reach = mask.float()
    for _ in range(6):
        reach = ((reach @ reach) > 0).float()
    for query in range(num_tokens):
        block = query // size
        expected = {*range(block * size, (block + 1) * size), *range(num_tokens, num_tokens + block * size)}
        assert set(reach[query].nonzero()[:, 0].tolist()) == expected


def toy_backbone(corrupted: CorruptedBatch) -> Tensor:
    """Return hidden states of two layers of attention over token and position embeddings."""
    generator = torch.Generator().manual_seed(5)
    tokens, positions = (torch.randn(100, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    layers = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64) / 4
    hidden = tokens[corrupted.input_ids] + positions[corrupted.position_ids]
    for layer in layers:
        query, key, value = (hidden @ weight for weight in layer)
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask(corrupted))
    return hidden


@pytest.mark.parametrize("shifted", [False, True])
def test_one_block_is_the_masked_objective(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens, shifted: bool
) -> None:
    """With one block as long as the text, block diffusion is masked diffusion: same hidden states, same loss."""
    batch = make_batch([(4, 12), (7, 9)])
    noise, ratio = make_noise(batch), torch.tensor([0.5, 0.8])
    block, masked = BlockMasked(block_size=16, shifted=shifted), Masked(shifted=shifted)
    doubled = block.corrupt(batch, noise, special_tokens, mask_ratio=ratio)
    single = masked.corrupt(batch, noise, special_tokens, mask_ratio=ratio)
    assert attention_mask(doubled) is not None
    assert not attention_mask(doubled)[:, :16, 16:].any()

    hidden = toy_backbone(doubled)
    torch.testing.assert_close(hidden[:, :16], toy_backbone(single))
    # The same sums up to the normalisation: by all response tokens here, by the tokens of each sample there.
    torch.testing.assert_close(doubled.weights[:, :16], single.weights * batch.response_lengths[:, None])
    head = torch.nn.Linear(16, 100, dtype=torch.float64)
    single_sample = make_batch([(4, 12)])
    losses = []
    for objective in (block, masked):
        corrupted = objective.corrupt(single_sample, make_noise(single_sample), special_tokens, mask_ratio=ratio[:1])
        losses.append(objective.loss(toy_backbone(corrupted), head, corrupted).total)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)


def test_clean_half_gives_what_a_block_causal_model_gives_on_the_text(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    """A decoder that caches finished blocks sees the same history as in training."""
    batch = make_batch([(4, 12), (1, 7)])
    objective = BlockMasked(block_size=4)
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens, mask_ratio=torch.tensor([0.5, 0.5]))
    hidden = toy_backbone(corrupted)
    for row, length in ((0, 16), (1, 8)):
        for block in range(0, length, 4):
            # The clean history, then the noisy block, with the attention of a decoder.
            ids = torch.cat((corrupted.input_ids[row, 16 : 16 + block], corrupted.input_ids[row, block : block + 4]))
            stops = (torch.arange(block + 4) // 4 + 1) * 4
            alone = CorruptedBatch(
                input_ids=ids[None],
                position_ids=torch.arange(block + 4)[None],
                labels=ids[None],
                weights=torch.ones(1, block + 4),
                terms=torch.zeros(1, block + 4, dtype=torch.long),
                counts=torch.ones(1),
                visible=torch.stack((torch.zeros_like(stops), stops), -1)[None, :, None],
            )
            torch.testing.assert_close(toy_backbone(alone)[0, block:], hidden[row, block : block + 4])


@pytest.mark.parametrize(("t_min", "t_max"), [(1e-9, 1.0), (0.3, 0.8)])
def test_block_probabilities_are_uniform_and_stratified(
    make_batch: MakeBatch,
    make_noise: Noise,
    special_tokens: SpecialTokens,
    chi_square: Callable[..., float],
    t_min: float,
    t_max: float,
) -> None:
    num_rows, size = 4000, 64
    batch = make_batch([(1, 4 * size - 1)] * num_rows)
    corrupted = BlockMasked(block_size=size, t_min=t_min, t_max=t_max).corrupt(batch, make_noise(batch), special_tokens)
    p = 1 / corrupted.weights[:, : 4 * size].unflatten(1, (4, size)).amax(2)  # infinite if nothing is masked
    t = (p - t_min) / (t_max - t_min)
    seen = p.isfinite()
    assert p[seen].min() >= t_min
    assert p[seen].max() <= t_max
    strata = (t.clamp(max=0.999999) * 4).long()
    full = seen.all(1)
    assert full.float().mean() > 0.9
    assert torch.equal(strata[full].sort(1).values, torch.arange(4).expand(int(full.sum()), 4)), "one in each quarter"
    if t_min < 0.1:
        t = t.nan_to_num(posinf=0.0)  # a block of 64 tokens without a mask: t is close to 0
    for block in range(4):
        bins = Counter((t[:, block].clamp(0, 0.999999) * 8).long().tolist())
        assert chi_square([bins[number] for number in range(8)], [num_rows / 8] * 8) < 26.0  # 7 degrees, p = 0.0005


def test_complementary_views_are_disjoint_and_cover_the_response(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    batch = make_batch(LENGTHS)
    objective = BlockMasked(block_size=8, complementary=True, shifted=True, fill_blocks_with="mask")
    corrupted = objective.corrupt(batch, make_noise(batch), special_tokens)
    assert corrupted.is_masked is not None
    first, second = corrupted.is_masked.chunk(2)
    assert not (first & second).any()
    for row, (prompt, response) in enumerate(LENGTHS):
        assert (first | second)[row].nonzero()[:, 0].tolist() == list(range(prompt, prompt + response))
    assert corrupted.labels.ne(IGNORE_INDEX).sum().item() == corrupted.counts.item()


@pytest.mark.parametrize(
    "options",
    [{"block_size": 0}, {"t_min": 0.0}, {"t_min": -0.1}, {"t_max": 1.2}, {"t_max": 0.2, "t_min": 0.3}],
)
def test_impossible_options_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        BlockMasked(**options)


def test_unknown_filling_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="fill_blocks_with"):  # TypeError under a runtime type checker
        BlockMasked(fill_blocks_with="pad")  # type: ignore[arg-type]


def test_traits() -> None:
    expected = ModelTraits(attention="block_causal", block_size=8, predictions=("mask",))
    assert BlockMasked().traits == expected
    shifted = BlockMasked(block_size=32, shifted=True).traits
    assert shifted == ModelTraits(attention="block_causal", block_size=32, predictions=("mask_shifted",))
