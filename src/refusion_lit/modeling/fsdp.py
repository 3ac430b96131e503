"""FSDP2: shards a backbone's weights across processes, and gathers them for decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from refusion_lit.modeling.backbone import Backbone

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(backbone: Backbone, mesh: DeviceMesh, *, compute_dtype: torch.dtype | None = None) -> None:
    """Shard a backbone's weights in place, layer by layer. A layer is gathered for its computation, then freed.

    Embedding, final norm and head form the outermost group. It stays gathered from the forward to the end of the
    backward pass, so that the loss can apply the head outside the backbone's forward.

    Args:
        backbone: A backbone with whole weights, the same on all processes.
        mesh: The processes to shard over; one dimension.
        compute_dtype: Type of gathered weights and activations, as in mixed precision; gradients are then
            reduced in float32. ``None`` keeps the weights' own type.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, output_dtype=compute_dtype)
    for layer in _layers(backbone):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(backbone, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def gather(backbone: Backbone) -> None:
    """Gather all weights of a sharded backbone on every process permanently.

    Decoding needs whole weights: processes make different numbers of forwards, so that gathering weights in every
    forward would deadlock. All processes must call this function together.
    """
    assert isinstance(backbone, FSDPModule)
    backbone.set_reshard_after_forward(False)
    start = torch.zeros(1, 1, dtype=torch.long, device=backbone.device)
    backbone(start, start)  # one forward gathers all layers, and none is freed afterwards


def _layers(backbone: Backbone) -> nn.ModuleList:
    """Return the list of the transformer's layers.

    Raises:
        ValueError: If the architecture keeps no such list.
    """
    count = backbone.config.num_hidden_layers
    for module in backbone.body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"trainer.strategy: {type(backbone.model).__name__} has no ModuleList of its {count} layers, so it cannot "
        "be sharded; use the strategy ddp."
    )
