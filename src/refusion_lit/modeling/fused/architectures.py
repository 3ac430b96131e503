"""Check that :class:`~refusion_lit.modeling.fused.body.FusedBody` supports a body in every detail."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies do not depend on the batch."""

_FAMILIES: tuple[tuple[type[nn.Module], ...], ...] = (
    (
        qwen3.Qwen3Model, qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RMSNorm,
        qwen3.Qwen3RotaryEmbedding,
    ),
    (
        qwen2.Qwen2Model, qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP, qwen2.Qwen2RMSNorm,
        qwen2.Qwen2RotaryEmbedding,
    ),
    (
        llama.LlamaModel, llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm,
        llama.LlamaRotaryEmbedding,
    ),
)  # fmt: skip
"""Classes of an architecture, the body's first."""

_COMMON: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, type(ACT2FN["silu"]))


def is_known(body: Any) -> bool:  # noqa: ANN401 - a transformers model, or a wrapper of one
    """Return whether :class:`~refusion_lit.modeling.fused.body.FusedBody` computes what a body computes.

    It must be made of exactly the known classes with plain parameters of one type on one device, unhooked and
    unpatched, with full attention by sdpa or (in training) flex attention, SiLU, rotary frequencies that do not depend
    on the batch, and no biases but those of queries, keys and values. So adapters, quantised or sharded weights and
    offloading are all refused.
    """
    family = next((family for family in _FAMILIES if family[0] is type(body)), None)
    if family is None or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    weight = body.embed_tokens.weight
    return _is_plain(body, {*family, *_COMMON}, weight.dtype, weight.device) and _is_usual(body)


def _is_plain(module: nn.Module, classes: set[type], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a module and its submodules are unmodified, of known classes and with plain parameters."""
    if (
        type(module) not in classes
        or module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
    ):
        return False
    for weight in module._parameters.values():
        if weight is not None and not (
            type(weight) is nn.Parameter and weight.dtype == dtype and weight.device == device
        ):
            return False
    return all(child is not None and _is_plain(child, classes, dtype, device) for child in module._modules.values())


def _is_usual(body: Any) -> bool:  # noqa: ANN401
    """Return whether a body's options are those that :class:`~refusion_lit.modeling.fused.body.FusedBody` computes."""
    config = body.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or ()
    return (
        config._attn_implementation in ("sdpa", "flex_attention")
        and rope.get("rope_type", "default") in _FIXED_ROPE
        and all(kind == "full_attention" for kind in kinds)
        and len(body.layers) == config.num_hidden_layers > 0
        and all(_is_usual_layer(layer, drops=body.training) for layer in body.layers)
    )


def _is_usual_layer(layer: Any, *, drops: bool) -> bool:  # noqa: ANN401
    attention, mlp = layer.self_attn, layer.mlp
    others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        all(linear.bias is None for linear in others)
        and attention.scaling == attention.head_dim**-0.5
        and not (drops and attention.attention_dropout)
    )
