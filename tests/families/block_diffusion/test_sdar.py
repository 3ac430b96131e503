"""SDAR's rules in BlockDiffusion; tests/goldens compares them with the authors' program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refusion_lit.decoding import BlockDiffusion, Generation, decode
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.fakes import SPECIAL, VOCAB, tiny_backbone

NO_END = (VOCAB + 2,)


def decode_prompt(
    decoder: BlockDiffusion, prompt: Prompt, ends: tuple[int, ...], sampling: SamplingParams, *, trace: bool = False
) -> Generation:
    traits = ModelTraits(attention="block_causal", block_size=decoder.block_size, predictions=("mask",))
    model = tiny_backbone(traits, replace(SPECIAL, eos_token_ids=ends))
    [row] = decode(model, decoder, [prompt], sampling, trace=trace).rows
    return row


@pytest.mark.parametrize(("threshold", "num_per_block"), [(1.0, 4), (0.0, 1)])
def test_a_block_costs_its_steps_and_one_forward_that_stores_it(threshold: float, num_per_block: int) -> None:
    decoder = BlockDiffusion(block_size=4, num_steps=4, threshold=threshold, confidence="tempered", fused=False)
    prompt = Prompt(token_ids=(3, 4, 5, 6, 7, 8, 9, 10), id="p")
    row = decode_prompt(decoder, prompt, NO_END, SamplingParams(max_new_tokens=20))
    # One stores the prompt; of the five blocks, the last is not stored.
    assert row.num_forwards == 1 + 5 * (num_per_block + 1) - 1


def test_the_published_default_is_the_dynamic_rule() -> None:
    traits = FORMATS["sdar"].traits({})
    options = FORMATS["sdar"].default_decoder(traits)["init_args"]
    assert BlockDiffusion(**options) == BlockDiffusion(block_size=4, threshold=0.85, confidence="tempered", fused=False)
    # Without num_steps a step commits at least one token, as with as many steps as tokens.
    prompt, sampling = Prompt(token_ids=(3, 4, 5), id="p"), SamplingParams(max_new_tokens=30)
    rows = [
        decode_prompt(BlockDiffusion(**options, num_steps=steps), prompt, NO_END, sampling).forward_shapes
        for steps in (None, 4)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("num_steps", "num_per_forward"), [(None, 1), (2, 2), (1, 4)])
def test_sequential_fills_the_leftmost_masks(num_steps: int | None, num_per_forward: int) -> None:
    decoder = BlockDiffusion(block_size=4, sampling_rule="sequential", num_steps=num_steps)
    prompt = Prompt(token_ids=(3, 4, 5, 6), id="p")
    row = decode_prompt(decoder, prompt, NO_END, SamplingParams(max_new_tokens=8), trace=True)
    accepted = [position - 4 for entry in row.trace for position in entry.accepted]
    assert accepted == [*range(8)]
    assert {len(entry.accepted) for entry in row.trace} == {num_per_forward}


@pytest.mark.parametrize(("bound", "num_forwards"), [(0.0, 8), (1e9, 2)])
def test_an_entropy_bound_of_zero_fills_one_mask_and_a_high_one_the_block(bound: float, num_forwards: int) -> None:
    decoder = BlockDiffusion(block_size=4, sampling_rule="entropy_bounded", entropy_bound=bound)
    prompt = Prompt(token_ids=(3, 4, 5, 6), id="p")
    assert decode_prompt(decoder, prompt, NO_END, SamplingParams(max_new_tokens=8)).num_forwards == num_forwards
