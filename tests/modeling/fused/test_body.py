"""The fused body, our fast forward pass, gives the hidden states of transformers' modules."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from refusion_lit.modeling import kv_cache
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.fused import body as body_module
from refusion_lit.modeling.fused.body import FusedBody, is_known
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import ModelTraits
from support.fakes import SPECIAL, VOCAB

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    "initializer_range": 0.5, "use_cache": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3, tied, one key head": (
        "qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen2": ("qwen2", {"head_dim": 6}),
    "llama, a key head a head": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 256}),
    "yarn scaling": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 128}),
}  # fmt: skip


def library(model_type: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or "bias" in name:  # made as ones and zeros, which would hide what they do
                    weight.copy_(torch.rand_like(weight) + 0.5)
    return model


def backbone(model: Any, *, fused_body: bool) -> Backbone:
    return Backbone(model, ModelTraits(), SPECIAL, fused_body=fused_body)


def random_mask(rows: int, queries: int, keys: int, seed: int) -> Tensor:
    mask = torch.rand(rows, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:, :, 0] = True
    return mask


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 9999),
    rows=st.integers(1, 3),
    length=st.integers(1, 9),
    masked=st.booleans(),
    table=st.sampled_from([40, 1 << 14]),
)
def test_the_fused_body_gives_the_library_s_hidden_states(
    name: str, seed: int, rows: int, length: int, masked: bool, table: int
) -> None:
    model = library(MODELS[name][0], **MODELS[name][1])
    assert is_known(model.model)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    positions = torch.randint(0, 120, (rows, length), generator=generator)
    mask = random_mask(rows, length, length, seed) if masked else None
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_MAX_TABLE", table)  # of angles; positions reach 119
        expected = backbone(model, fused_body=False).hidden_states(ids, positions, mask)
        actual = backbone(model, fused_body=True).hidden_states(ids, positions, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "sdpa") for name in MODELS), ("qwen3", "flex_attention")]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_fused_body_writes_and_reads_the_same_cache(
    name: str, implementation: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths are fed in any selection, entries are dropped and moved, and the storage grows."""
    monkeypatch.setattr(kv_cache, "CHUNK", 8)
    model, chance = library(MODELS[name][0], **MODELS[name][1]), random.Random(seed)
    other = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    fused, plain = backbone(other, fused_body=True), backbone(model, fused_body=False)
    assert isinstance(fused.make_fused_body(), FusedBody)
    assert plain.make_fused_body() is None
    fused_cache, plain_cache = fused.make_cache(3), plain.make_cache(3)
    for step in range(6):
        rows = chance.sample(range(3), chance.randint(1, 3)) if step % 2 else [0, 1, 2]
        length, num_keys = chance.randint(1, 5), 6 + 3 * step
        fed = [chance.randint(1, length) if step else length for _ in rows]
        places = [(i * length + j, row, num_keys - length + j) for i, row in enumerate(rows) for j in range(fed[i])]
        source, row_index, cache_index = (torch.tensor(values) for values in zip(*places, strict=True))
        ids = torch.tensor([[chance.randrange(VOCAB) for _ in range(length)] for _ in rows])
        positions = torch.tensor([[chance.randrange(120) for _ in range(length)] for _ in rows])
        mask = random_mask(len(rows), length, num_keys, chance.randrange(999))
        # Where all tokens are stored, their indices may be left out; every third step gives them nevertheless.
        gives_source = len(places) < ids.numel() or step % 3 == 2
        states = []
        for model_, cache in ((fused, fused_cache), (plain, plain_cache)):
            cache.prepare(rows, num_keys, source if gives_source else None, row_index, cache_index)
            with torch.no_grad():
                # Tokens that are not stored are padding, which the fused body does not compute.
                states.append(model_.hidden_states(ids, positions, mask, cache).flatten(0, 1)[source])
            cache.compact(rows[0], [3, 1, 0, 2])
        torch.testing.assert_close(states[0], states[1], rtol=1e-10, atol=1e-10)
    assert fused_cache.capacity > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_agree_as_far_as_they_can(dtype: torch.dtype) -> None:
    model = library("qwen3", dtype, initializer_range=0.1)
    ids, positions, mask = torch.arange(12).view(2, 6), torch.arange(6).expand(2, 6), random_mask(2, 6, 6, 0)
    with torch.no_grad():
        expected = backbone(model, fused_body=False).hidden_states(ids, positions, mask)
        actual = backbone(model, fused_body=True).hidden_states(ids, positions, mask)
    assert actual.dtype == dtype
    close = 1e-4 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


def test_the_library_computes_with_gradients_in_training_with_hooks_and_under_autocast() -> None:
    model = library("qwen3")
    fused, plain = backbone(model, fused_body=True), backbone(model, fused_body=False)
    ids, positions = torch.arange(6)[None], torch.arange(6)[None]
    assert fused.hidden_states(ids, positions, None).requires_grad
    with torch.no_grad():
        assert torch.equal(fused(ids, positions), plain.hidden_states(ids, positions, None))
    hook_calls: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: hook_calls.append(1))
    with torch.no_grad():
        fused.hidden_states(ids, positions, None)
    assert hook_calls == [1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fused.hidden_states(ids, positions, None)


class _Adapted(nn.Linear):
    """A linear layer of another class that replaces one of the model's."""


def _adapt(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = _Adapted(24, 20, bias=False, dtype=torch.float64)


def _patch(model: Any) -> None:
    model.model.layers[0].self_attn.forward = lambda *_: None


def _retype(model: Any) -> None:
    model.model.norm.float()


def _add_bias(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.bias = nn.Parameter(torch.ones(24, dtype=torch.float64))


def _subclass(model: Any) -> None:
    weight = model.model.layers[0].mlp.gate_proj.weight
    sharded = type("Sharded", (nn.Parameter,), {})
    model.model.layers[0].mlp.gate_proj._parameters["weight"] = weight.as_subclass(sharded)


def _slide(model: Any) -> None:
    model.config.layer_types = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "change",
    [
        _adapt, _patch, _retype, _add_bias, _subclass, _slide,
        lambda model: model.model.layers[0].register_forward_pre_hook(lambda *_: None),
        lambda model: setattr(model.model.layers[0].mlp, "_compiled_call_impl", print),  # as compile() does
        lambda model: model.set_attn_implementation("eager"),
        lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.0),
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()),
        lambda model: setattr(model.config, "num_hidden_layers", 1),
    ],
)  # fmt: skip
def test_what_is_not_known_to_the_last_detail_is_refused(change: Callable[[Any], Any]) -> None:
    model = library("qwen3")
    assert is_known(model.model)
    change(model)
    assert not is_known(model.model)


def test_dropout_and_moving_frequencies_are_refused() -> None:
    dropping = library("llama", attention_dropout=0.1)
    assert is_known(dropping.model)
    assert not is_known(dropping.model.train())
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert not is_known(library("llama", rope_parameters=dynamic).model)
    assert not is_known(library("mistral", sliding_window=None).model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    adapted = peft.get_peft_model(library("qwen3", torch.float32), config)
    assert backbone(adapted, fused_body=True).make_fused_body() is None


def test_no_matrix_is_copied_where_copies_do_not_pay() -> None:
    model = library("qwen2", head_dim=6)
    fused = FusedBody(model.model)
    layer, fused_layer = model.model.layers[0], fused._layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    assert [weight.data_ptr() for weight in fused_layer.heads.weights] == [
        module.weight.data_ptr() for module in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    assert [weight.data_ptr() for weight in fused_layer.down.weights] == [mlp.down_proj.weight.data_ptr()]
    assert copy.deepcopy(backbone(model, fused_body=True)).fused_body


def test_a_cache_that_others_made_serves_the_library() -> None:
    model = backbone(library("qwen3"), fused_body=True)
    cache = KVCache(2, 1)
    ids, positions, mask = torch.arange(4)[None], torch.arange(4)[None], torch.ones(1, 4, 4, dtype=torch.bool).tril()
    cache.prepare([0], 4, torch.arange(4), torch.zeros(4, dtype=torch.long), torch.arange(4))
    with torch.no_grad():
        hidden = model.hidden_states(ids, positions, mask, cache)
        torch.testing.assert_close(hidden, model.hidden_states(ids, positions, mask), rtol=1e-5, atol=1e-5)
