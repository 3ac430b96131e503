"""Ranges in place of a matrix: the same losses and gradients, and nothing as large as the square of the length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.packing import pack
from refusion_lit.modeling.attention import RangeMask, block_mask
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.transformers_forward import sdpa_mask
from refusion_lit.modeling.visibility import ranges_mask
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked, DualStream, Hybrid, Masked, Objective
from refusion_lit.types import ModelTraits, SpecialTokens
from support.attention_masks import attention_mask
from support.tiny import TINY_QWEN

VOCAB = 60
SPECIAL = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=VOCAB)
OBJECTIVES: dict[str, Objective] = {
    "hybrid": Hybrid(),
    "masked": Masked(),
    "block": BlockMasked(block_size=8),
    "dual": DualStream(),
}


def random_ranges(num_tokens: int, num_keys: int, seed: int) -> Tensor:
    """Return random ranges (row, token, range, bound), two for every token.

    The first range is empty if its start is not before its end; the second range never is.
    """
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, num_keys, (2, num_tokens, 2, 2), generator=generator)
    bounds[:, :, 1] = bounds[:, :, 1].sort(-1).values
    bounds[:, :, 1, 1] += 1
    return bounds


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(300, 300), (40, 700), (1, 257)])
def test_outputs_and_gradients_are_those_of_the_matrix(num_tokens: int, num_keys: int) -> None:
    ranges = random_ranges(num_tokens, num_keys, seed=num_tokens)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, num_tokens, 8), (2, 2, num_keys, 8), (2, 2, num_keys, 8), (2, 4, num_tokens, 8))
    *states, weights = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    states = [state.requires_grad_() for state in states]
    results = []
    for mask in (sdpa_mask(ranges, num_keys, ranges.device), ranges_mask(ranges, num_keys)[:, None]):
        actual = F.scaled_dot_product_attention(*states, attn_mask=mask, scale=0.3, enable_gqa=True)
        results.append([actual, *torch.autograd.grad((actual * weights).sum(), states)])
    assert isinstance(sdpa_mask(ranges, num_keys, ranges.device), RangeMask)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def build_model(*, checkpointing: bool = False) -> Backbone:
    config = AutoConfig.for_model(**TINY_QWEN | {"num_hidden_layers": 2, "vocab_size": VOCAB})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return Backbone(model, ModelTraits(), SPECIAL).train()


def make_batch(objective: Objective, samples: list[tuple[int, int]], rows: list[int] | None = None) -> CorruptedBatch:
    prompts, responses = torch.tensor(samples).unbind(1)
    lengths = prompts + responses
    ids = torch.randint(3, VOCAB, (len(samples), int(lengths.max())), generator=torch.Generator().manual_seed(0))
    ids = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], 0)
    batch = ResponseBatch(
        input_ids=ids, prompt_lengths=prompts, response_lengths=responses, sample_keys=torch.arange(len(samples))
    )
    corrupted = objective.corrupt(batch, KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0), SPECIAL)
    return corrupted if rows is None else pack(corrupted, torch.tensor(rows), pad_token_id=0)


def gradients(model: Backbone, objective: Objective, corrupted: CorruptedBatch, mask: Tensor | None) -> list[Tensor]:
    hidden = model(corrupted.input_ids, corrupted.position_ids, mask)
    loss = objective.loss(hidden, model.head, corrupted).total
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # its new name is unknown to older releases
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rows", [None, [0, 1, 1, 0]], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_training_step_is_that_with_the_matrix(name: str, rows: list[int] | None, checkpointing: bool) -> None:
    objective, model = OBJECTIVES[name], build_model(checkpointing=checkpointing)
    corrupted = make_batch(objective, [(100, 210), (3, 60), (0, 301), (30, 9)], rows)
    actual = gradients(model, objective, corrupted, corrupted.visible)
    expected = gradients(model, objective, corrupted, attention_mask(corrupted))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))])
        return output


@pytest.mark.parametrize("rows", [None, [0, 0, 0]], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_in_a_step_is_as_large_as_the_square_of_the_length(name: str, rows: list[int] | None) -> None:
    objective, model = OBJECTIVES[name], build_model()
    sizes = []
    for length in (200, 400):
        corrupted = make_batch(objective, [(length, 10), (length // 2, 20), (length // 4, 30)], rows)
        with Largest() as largest:
            gradients(model, objective, corrupted, corrupted.visible)
        sizes.append(largest.size)
    assert sizes[1] < 2.3 * sizes[0]  # about twice as large for twice the length; a matrix would be four times as large
    with Largest() as largest:  # with a matrix, the largest tensor is larger
        model(corrupted.input_ids, corrupted.position_ids, attention_mask(corrupted))
    assert largest.size > sizes[1] or corrupted.visible is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_gets_the_blocks_of_keys_that_are_seen() -> None:
    block_size = 128  # of flex attention; 300 tokens are three blocks
    ranges = random_ranges(300, 300, seed=1)
    ranges[:, :, 0, 1] = ranges[:, :, 0, 0]  # the first range of a token is empty
    ranges[:, :block_size, 1] = torch.tensor([0, 5])  # the first block of queries sees keys 0 to 4 alone
    actual, expected = (block_mask(mask, 300, ranges.device) for mask in (ranges, ranges_mask(ranges, 300)))
    assert torch.equal(actual.to_dense(), expected.to_dense())
    blocks_of_first_queries = actual.to_dense()[:, 0, 0]
    assert blocks_of_first_queries.tolist() == [[1, 0, 0]] * len(ranges)


@pytest.mark.parametrize("name", ["masked", "block"])
def test_decoding_s_body_takes_ranges(name: str) -> None:
    model, corrupted = build_model().eval(), make_batch(OBJECTIVES[name], [(100, 210), (3, 60)])
    inputs = corrupted.input_ids, corrupted.position_ids
    with torch.no_grad():
        actual = model.hidden_states(*inputs, corrupted.visible)
        with Largest() as largest:
            model.hidden_states(*inputs, corrupted.visible)
        expected = model.hidden_states(*inputs, attention_mask(corrupted))
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
    assert largest.size < corrupted.input_ids.shape[1] ** 2
