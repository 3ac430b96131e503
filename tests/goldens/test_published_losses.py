"""Masks and losses of BD3-LM's and Fast-dLLM v2's programs, their random numbers given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.learning.batch import IGNORE_INDEX, ResponseBatch
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked
from refusion_lit.types import SpecialTokens
from support.published import published_model, reference


class GivenNoise(KeyedNoise):
    """Gives the numbers that a program drew."""

    def __init__(self, **streams: Tensor) -> None:
        self._streams = streams

    def uniform(self, stream: str, size: int, *, start: int = 0) -> Tensor:
        return self._streams[stream][:, start : start + size]


def make_batch(ids: Any, prompts: list[int], responses: list[int]) -> ResponseBatch:
    lengths = {"prompt_lengths": torch.tensor(prompts), "response_lengths": torch.tensor(responses)}
    return ResponseBatch(input_ids=torch.tensor(ids), sample_keys=torch.arange(len(prompts)), **lengths)


@pytest.mark.parametrize("index", range(4))
def test_the_mask_is_bd3lms(index: int) -> None:
    case = reference("bd3lm_mask")["masks"][index]
    expected = torch.tensor([[character == "1" for character in row] for row in case["rows"]])
    ranges = three_part_ranges(case["num_tokens"], case["block_size"], torch.tensor([case["num_tokens"]]))
    assert torch.equal(ranges_mask(ranges, 2 * case["num_tokens"])[0], expected)


@pytest.mark.parametrize("index", range(20))
def test_masks_weights_and_loss_are_bd3lms(index: int) -> None:
    golden = reference("bd3lm_loss")
    case, mask_id = golden["cases"][index], golden["mask_token_id"]
    (low, high), counted = case["interval"], torch.tensor(case["attention_mask"])
    objective = BlockMasked(
        block_size=case["block_size"],
        t_min=low,
        t_max=high,
        stratified=False,
        fill_blocks_with="mask",
        denominator="all_tokens" if case["training"] else "response",
    )
    times = torch.tensor(case["block_t"], dtype=torch.float64)
    noise = GivenNoise(
        block_ratio=(times - low) / max(high - low, 1e-9),
        token_mask=1 - torch.tensor(case["masked_before_bos"], dtype=torch.float64),
    )
    special = SpecialTokens(mask_token_id=mask_id, eos_token_ids=(0,), pad_token_id=0, vocab_size=golden["vocab_size"])
    responses = (counted.sum(1) - 1).tolist()  # the program never masks the first token
    corrupted = objective.corrupt(make_batch(case["clean"], [1] * len(responses), responses), noise, special)

    size, is_text = case["num_tokens"], counted.bool()
    assert torch.equal(corrupted.input_ids[:, :size][is_text], torch.tensor(case["noisy"])[is_text])
    assert (corrupted.input_ids[:, size:][is_text] == torch.tensor(case["clean"])[is_text]).all()
    weights = torch.tensor(case["weights"])
    torch.testing.assert_close(corrupted.weights[:, :size][is_text], weights[is_text], rtol=1e-5, atol=1e-6)
    logits = F.pad(torch.tensor(case["logits"]), (0, 0, 0, size))
    banned = torch.arange(golden["vocab_size"]) == mask_id
    output = objective.loss(logits, lambda hidden: hidden.masked_fill(banned, -torch.inf), corrupted)
    assert output.counts.tolist() == [case["denominator"]]
    torch.testing.assert_close(float(output.total), case["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("index", range(3))
def test_views_and_loss_are_those_of_fast_dllm_v2(index: int) -> None:
    case = reference("fast_dllm_v2_loss")["batches"][index]
    backbone = published_model("fast-dllm-v2-tiny").backbone
    objective = BlockMasked(block_size=32, complementary=True, shifted=True, fill_blocks_with="mask", stratified=False)
    noise = GivenNoise(**{name: torch.tensor(case[key], dtype=torch.float64)
                          for name, key in {"block_ratio": "t", "token_mask": "uniform"}.items()})  # fmt: skip
    prompts, responses = case["prompt_lengths"], case["response_lengths"]
    corrupted = objective.corrupt(
        make_batch(case["clean_input_ids"], prompts, responses), noise, backbone.special_tokens
    )
    half = corrupted.input_ids.shape[1] // 2
    noisy, targets = torch.tensor(case["noisy_input_ids"]), torch.tensor(case["labels_of_both_views"])
    num_targets = 0
    for row, length in enumerate([*map(sum, zip(prompts, responses, strict=True))] * 2):
        assert corrupted.input_ids[row, :length].tolist() == noisy[row, :length].tolist()
        assert corrupted.labels[row, : length - 1].tolist() == targets[row, 1:length].tolist()
        num_targets += int((targets[row] != IGNORE_INDEX).sum())
    assert num_targets == case["num_targets"]
    assert corrupted.counts.tolist() == [num_targets]
    with torch.no_grad():
        hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
        output = objective.loss(hidden, backbone.head, corrupted)
    assert half % 32 == 0
    torch.testing.assert_close(float(output.total), case["loss"], rtol=1e-5, atol=1e-6)
