"""Packed weights: copies of a layer's weights in a layout that multiplies faster on a CPU.

Packed weights give the same products, are repacked when a weight changes, and are no part of a model's copy.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from refusion_lit.decoding import Autoregressive, Decoder, ReFusion, SelfSpeculative, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.fused import linear
from refusion_lit.modeling.fused.linear import Linear, PackedWeights
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens

TYPES = [torch.float32, torch.bfloat16]


def make_weight(dtype: torch.dtype, *, rows: int = 300, columns: int = 320) -> torch.nn.Parameter:
    """Return a random weight; the default size is large enough to be packed."""
    generator = torch.Generator().manual_seed(0)
    return torch.nn.Parameter(torch.randn(rows, columns, generator=generator).to(dtype), requires_grad=False)


def skip_without_fast_product(dtype: torch.dtype) -> None:
    """Skip the test if this processor packs no weights of a type."""
    if not PackedWeights.supports([make_weight(dtype)]):
        pytest.skip(f"this processor has no fast {dtype} product")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 33, 257])
@torch.no_grad()
def test_products_are_equal_up_to_rounding(dtype: torch.dtype, num_tokens: int) -> None:
    weight, bias = make_weight(dtype), torch.linspace(-1, 1, 300).to(dtype)
    x = torch.randn(num_tokens, 320, generator=torch.Generator().manual_seed(1)).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.5  # sums of 320 products of size one
    with_bias = Linear([weight], [bias], PackedWeights())(x)
    without_bias = Linear([weight], packed=PackedWeights())(x)
    assert with_bias.dtype == dtype
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(with_bias.double(), expected + bias.double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(without_bias.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("shape", [(1, 320), (1, 1, 320), (320,)])
@torch.no_grad()
def test_a_product_of_one_token_keeps_its_shape(shape: tuple[int, ...]) -> None:
    skip_without_fast_product(torch.float32)
    weight, x = make_weight(torch.float32), torch.linspace(-1, 1, 320).view(shape)
    actual = Linear([weight], packed=PackedWeights())(x)
    torch.testing.assert_close(actual, F.linear(x, weight), atol=1e-4, rtol=0)


@pytest.mark.parametrize("has_copies", [True, False])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
@pytest.mark.parametrize("columns", [pytest.param(320, id="large enough to pack"), pytest.param(16, id="too small")])
@torch.no_grad()
def test_layers_with_the_same_input_are_one_product(dtype: torch.dtype, columns: int, *, has_copies: bool) -> None:
    weights = [make_weight(dtype, rows=rows, columns=columns) for rows in (300, 100, 50)]
    biases = [torch.linspace(-1, 1, len(weight)).to(dtype) for weight in weights]
    packed = PackedWeights() if has_copies else None
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 1.0}[dtype]
    for given_biases in (biases, [None] * 3):
        for _ in range(2):
            joint = Linear(weights, given_biases, packed)
            expected = torch.cat([F.linear(x, *layer) for layer in zip(weights, given_biases, strict=True)], -1)
            torch.testing.assert_close(joint(x), expected, atol=tolerance, rtol=0)
            weights[2].mul_(2)  # the next product must not use the copy of the old weight
    if packed is not None:
        num_copies = 1 if PackedWeights.supports(weights) else 0  # a new copy replaces the old copy
        assert len(packed._copies) == num_copies


@pytest.mark.parametrize("dtype", TYPES)
@torch.no_grad()
def test_a_changed_weight_is_repacked(dtype: torch.dtype) -> None:
    skip_without_fast_product(dtype)
    packed, weight, x = PackedWeights(), make_weight(dtype), torch.ones(4, 320, dtype=dtype)
    before = Linear([weight], packed=packed)(x)
    assert packed.get_copy([weight]) is packed.get_copy([weight])
    weight.mul_(2)
    assert torch.equal(Linear([weight], packed=packed)(x), before * 2)


@torch.no_grad()
def test_small_weights_and_other_types_have_no_copy() -> None:
    packed = PackedWeights()
    for weight in (make_weight(torch.float32, rows=8), make_weight(torch.float64)):
        x = torch.ones(4, 320, dtype=weight.dtype)
        assert torch.equal(Linear([weight], packed=packed)(x), F.linear(x, weight))
    assert len(packed._copies) == 0


def test_copies_of_a_model_hold_no_packed_weights() -> None:
    skip_without_fast_product(torch.float32)
    packed, weight = PackedWeights(), make_weight(torch.float32)
    packed.get_copy([weight])
    assert len(packed._copies) == 1
    assert len(copy.deepcopy(packed)._copies) == 0
    assert len(pickle.loads(pickle.dumps(packed))._copies) == 0


def test_two_threads_pack_weights_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_fast_product(torch.float32)
    packed, weights = PackedWeights(), [make_weight(torch.float32) for _ in range(3)]
    packed.get_copy(weights[:1])
    second = threading.Thread(target=packed.get_copy, args=(weights[2:],))

    def num_bytes(_: Sequence[Tensor]) -> int:
        # While the first thread iterates over the copies, the second thread tries to add a copy.
        if threading.current_thread() is threading.main_thread() and not second.ident:
            second.start()
            second.join(0.5)
        return 1

    monkeypatch.setattr(linear, "_num_bytes", num_bytes)
    packed.get_copy(weights[1:2])
    second.join()
    assert len(packed._copies) == 3


def make_backbone() -> Backbone:
    """Return a random Llama whose layers are large enough to be packed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    special = SpecialTokens(mask_token_id=399, pad_token_id=398, eos_token_ids=(397,), vocab_size=400)
    traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot", "next_token"))
    return Backbone(model, traits, special)


@pytest.mark.parametrize(
    "decoder", [Autoregressive(), ReFusion(), SelfSpeculative(slot_size=4)], ids=lambda d: type(d).__name__
)
def test_tokens_do_not_depend_on_packing(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_fast_product(torch.float32)
    model, sampling = make_backbone(), SamplingParams(max_new_tokens=24)
    prompts = [Prompt(token_ids=tuple(range(5 + i, 17 + i)), id=str(i)) for i in range(3)]
    rows = decode(model, decoder, prompts, sampling, batch_size=3).rows
    assert len(model.packed._copies) > 0
    monkeypatch.setattr(PackedWeights, "supports", lambda *_: False)
    expected = decode(model, decoder, prompts, sampling, batch_size=3).rows
    assert [row.token_ids for row in rows] == [row.token_ids for row in expected]


def test_a_model_that_changes_type_and_back_is_repacked() -> None:
    skip_without_fast_product(torch.float32)
    model, sampling = make_backbone(), SamplingParams(max_new_tokens=4)
    decode(model, ReFusion(), [Prompt(token_ids=(1, 2, 3), id="0")], sampling)
    assert len(model.packed._copies) > 0
    model.to(torch.bfloat16).to(torch.float32)
    assert len(model.packed._copies) == 0


def test_weights_that_a_fused_optimizer_changed_are_repacked() -> None:
    skip_without_fast_product(torch.float32)
    model = make_backbone()
    ids, positions = torch.arange(5, 17)[None], torch.arange(12)[None]

    def compute_logits(model: Backbone) -> Tensor:
        with torch.no_grad():
            return model.logits(model.hidden_states(ids, positions, None))

    before = compute_logits(model)
    assert len(model.packed._copies) > 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model.head(model(ids, positions)).square().mean().backward()
    optimizer.step()
    after = compute_logits(model)
    assert not torch.allclose(after, before)
    assert torch.equal(after, compute_logits(copy.deepcopy(model)))
