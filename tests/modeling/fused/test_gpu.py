"""The fused backbone on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import ModelTraits
from support.fakes import SPECIAL
from support.ragged import make_ragged

DEVICE = "cuda"
SIZES = [[(9, 30), (2, 17), (16, 16)], [(3, 40), (12, 150)], [(1, 9), (7, 20), (5, 33)]]


def build_model() -> Backbone:
    config = Qwen3Config(
        vocab_size=14, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    return Backbone(model.to(DEVICE), ModelTraits(), SPECIAL)


def forwards(model: Backbone, *, may_wait: bool = True) -> list[Tensor]:
    """Return hidden states of the real tokens of some ragged forwards."""
    cache, device = model.make_cache(3), model.device
    outputs = []
    for seed, sizes in enumerate(SIZES):
        made = make_ragged(seed, sizes, [2, 0, 1][: len(sizes)])
        rows, plan = made.rows, made.plan
        assert rows.real is not None
        ids = torch.randint(0, 14, rows.shape, generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(rows.shape[1]).expand(rows.shape)
        cache.prepare(**{name: one.to(device) if torch.is_tensor(one) else one for name, one in plan.items()})
        given = [one.to(device) for one in (ids, positions)]
        torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
        try:
            with torch.no_grad():
                states = model.hidden_states(given[0], given[1], made.visibility, cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        outputs.append(states.flatten(0, 1)[rows.real.to(device)].cpu())
    return outputs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ragged_forwards_on_a_gpu_are_those_on_a_cpu_and_wait_for_nothing() -> None:
    model = build_model()
    on_cpu = Backbone(copy.deepcopy(model.model).to("cpu"), ModelTraits(), SPECIAL, fused_body=False)
    expected = forwards(on_cpu)
    for may_wait in (True, False):  # the first forwards set up libraries
        actual = forwards(model, may_wait=may_wait)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
