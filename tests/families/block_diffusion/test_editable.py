"""Block diffusion with wrong visible tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from refusion_lit.families.block_diffusion.token_editing import other_tokens
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked, EditableBlockMasked
from refusion_lit.types import SpecialTokens

MASK = 2
MakeBatch = Callable[..., ResponseBatch]
Noise = Callable[..., KeyedNoise]
LENGTHS = [(3, 9), (1, 1), (0, 17), (8, 8), (5, 4), (2, 16)]


@pytest.mark.parametrize("ratio", [None, 0.25, 1.0])
def test_equals_block_diffusion_and_the_slow_reference_of_visible_tokens(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens, ratio: float | None
) -> None:
    batch = make_batch(LENGTHS)
    noise = make_noise(batch)
    ratios = None if ratio is None else torch.full((len(LENGTHS),), ratio)
    plain = BlockMasked(block_size=4).corrupt(batch, noise, special_tokens, mask_ratio=ratios)
    objective = EditableBlockMasked(block_size=4, max_replaced=0.8, kept=0.5)
    corrupted = objective.corrupt(batch, noise, special_tokens, mask_ratio=ratios)
    width = plain.input_ids.shape[1] // 2
    shares = noise.uniform("replaced_share", 1)[:, 0].tolist()
    replaced, kept = (noise.uniform(name, width).tolist() for name in ("replaced", "kept"))
    assert plain.is_masked is not None
    num_replaced = num_kept = 0
    for row, (prompt, response) in enumerate(LENGTHS):
        end = -(-(prompt + response) // 4) * 4  # of the last block
        for i in range(2 * width):
            token, label, term = (
                int(values[row, i]) for values in (corrupted.input_ids, corrupted.labels, corrupted.terms)
            )
            before, text = int(plain.input_ids[row, i]), int(plain.input_ids[row, i % width + width])
            if not prompt <= i < end or plain.is_masked[row, i]:
                assert (token, label, term) == (before, int(plain.labels[row, i]), 0)
            elif replaced[row][i] < 0.8 * shares[row]:
                assert token not in (text, MASK, 0)
                assert (label, term) == (text, 1)
                num_replaced += 1
            elif kept[row][i] < 0.5:
                assert (token, label, term) == (text, text, 2)
                num_kept += 1
            else:
                assert (token, label, term) == (text, IGNORE_INDEX, 0)
            weight = float(plain.weights[row, i]) if plain.is_masked[row, i] else float(label != IGNORE_INDEX)
            assert float(corrupted.weights[row, i]) == weight
    assert corrupted.counts.tolist() == [*plain.counts.tolist(), num_replaced, num_kept]
    if ratio != 1.0:  # otherwise all tokens are masked
        assert min(num_replaced, num_kept) > 3


def test_without_visible_targets_it_is_block_diffusion(
    make_batch: MakeBatch, make_noise: Noise, special_tokens: SpecialTokens
) -> None:
    batch = make_batch(LENGTHS)
    noise = make_noise(batch)
    objective = EditableBlockMasked(block_size=4, max_replaced=0.0, kept=0.0)
    pair = [trained.corrupt(batch, noise, special_tokens) for trained in (BlockMasked(block_size=4), objective)]
    for name in ("input_ids", "position_ids", "labels", "weights", "terms", "visible", "is_masked"):
        assert torch.equal(*(getattr(corrupted, name) for corrupted in pair)), name
    assert pair[1].counts.tolist() == [*pair[0].counts.tolist(), 0, 0]


@pytest.mark.parametrize(("original", "mask"), [(0, 2), (2, 2), (4, 2), (3, 4), (4, 0), (1, 4)])
def test_replacements_are_uniform_over_all_other_tokens(original: int, mask: int) -> None:
    special = SpecialTokens(mask_token_id=mask, eos_token_ids=(1,), pad_token_id=1, vocab_size=5)
    uniform = (torch.arange(1200) / 1200)[None].double()
    drawn = other_tokens(torch.full((1, 1200), original), uniform, special)
    allowed = {0, 1, 2, 3, 4} - {original, mask}
    assert Counter(drawn[0].tolist()) == dict.fromkeys(allowed, 1200 // len(allowed))


@pytest.mark.parametrize(
    "options",
    [{"max_replaced": 1.5}, {"kept": -0.1}, {"edit_weight": -1.0}, {"keep_weight": -1.0}, {"shifted": True},
     {"complementary": True}],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        EditableBlockMasked(**options)  # type: ignore[arg-type]
