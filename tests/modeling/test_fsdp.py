"""Sharding over a mesh of one process: the same states and gradients, weights gathered. Two are in robustness/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.fsdp import gather, shard
from refusion_lit.types import ModelTraits, SpecialTokens
from support.tiny import TINY_QWEN

SPECIAL = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=32)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def small() -> Backbone:
    torch.manual_seed(0)
    config = Qwen3Config(**TINY_QWEN | {"num_hidden_layers": 2, "vocab_size": 32})
    return Backbone(Qwen3ForCausalLM(config), ModelTraits(), SPECIAL)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_states_and_gradients_are_those_of_whole_weights(mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
    whole, parts = small(), small()
    shard(parts, mesh, compute_dtype=compute_dtype)
    assert all(isinstance(weight, DTensor) for weight in parts.parameters())
    assert {weight.dtype for weight in parts.parameters()} == {torch.float32}, "master weights"
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])
    positions = torch.arange(4).expand(2, 4)
    expected, actual = (backbone(ids, positions) for backbone in (whole, parts))
    assert actual.dtype == (compute_dtype or torch.float32)
    _close(actual.float(), expected, rounded=compute_dtype is not None)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * direction).sum().backward()
    (actual.float() * direction).sum().backward()
    for (name, weight), part in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert isinstance(part.grad, DTensor), name
        assert part.grad.dtype == torch.float32
        assert weight.grad is not None
        _close(part.grad.full_tensor(), weight.grad, rounded=compute_dtype is not None)


def _close(actual: torch.Tensor, expected: torch.Tensor, *, rounded: bool) -> None:
    if rounded:  # bfloat16 keeps 8 bits
        assert (actual - expected).norm() < 0.05 * expected.norm()
    else:
        torch.testing.assert_close(actual, expected)


def test_gathered_weights_are_whole_from_then_on(mesh: DeviceMesh) -> None:
    whole, parts = small(), small()
    shard(parts, mesh)
    gather(parts)
    assert not any(isinstance(weight, DTensor) for weight in parts.parameters())
    for weight, gathered in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(gathered, weight)


def test_an_architecture_without_a_list_of_layers_is_refused(mesh: DeviceMesh) -> None:
    backbone = small()
    backbone.model.model.layers = nn.Sequential(*backbone.model.model.layers)
    with pytest.raises(ValueError, match=r"trainer\.strategy: Qwen3ForCausalLM .*ModuleList"):
        shard(backbone, mesh)
