"""The body of known architectures without a library's bookkeeping: the same weights, far fewer operations a layer.

Small models spend most of a forward in calls, not in arithmetic. :class:`LeanBody` runs Qwen2, Qwen3 and Llama bodies
through their own parameters: no copy of a matrix, and no module's ``forward`` but the rotary embedding's. Everything
that it does not know to the last detail is refused, and :class:`~refusion_lit.modeling.backbone.Backbone` then runs
the library's forward. Results are equal up to rounding, not to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from refusion_lit.modeling.kv_cache import SlotCache

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies do not depend on the batch."""

_MAX_TABLE = 1 << 14
"""On CPUs, angles of so many positions are kept; elsewhere looking for the highest position would stop the device."""

_Linear = tuple[Tensor, Tensor | None]

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


class _Norm:
    """Root-mean-square normalisation over the last axis, in float32 whatever the type, as the library computes it."""

    __slots__ = ("_by_hand", "_eps", "_floor", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        # On CPUs the norm of a vector is one fast operation, and torch's rms_norm is five.
        self._by_hand = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._eps = eps
        self._floor = weight.new_tensor((size * eps) ** 0.5)
        self._weight = weight * size**0.5 if self._by_hand else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._by_hand:  # w x / sqrt(|x|^2 / size + eps)
            root = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
            return x.div(root).mul_(self._weight)
        if x.dtype == torch.float64:  # step by step, so that nothing is rounded otherwise than in the library
            rounded = x.float()
            rounded = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + self._eps)
            return rounded.to(x.dtype).mul_(self._weight)
        return F.rms_norm(x, x.shape[-1:], None, self._eps).mul_(self._weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of a layer; ``heads_norm`` is Qwen3's, of query and key heads."""

    attention_norm: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    heads_norm: _Norm | None
    output: Tensor
    mlp_norm: _Norm
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the tokens that are no padding stand in a padded batch.

    Attributes:
        shape: Of the batch.
        real: Their flat indices, in the order they are computed in; ``None`` if nothing is padding.
    """

    shape: torch.Size
    real: Tensor | None

    def padded(self, states: Tensor) -> Tensor:
        """Put states of the real tokens where they stand among all [tokens of all rows, ...]; zeros elsewhere."""
        if self.real is None:
            return states
        return states.new_zeros(self.shape.numel(), *states.shape[1:]).index_copy_(0, self.real, states)

    def real_of(self, states: Tensor) -> Tensor:
        """Take the states of the real tokens."""
        return states if self.real is None else states[self.real]


class LeanBody:
    """A body's forward over its own parameters, without gradients.

    It holds what it found in the modules when it was made: make a new one after weights were replaced (changing them
    in place is fine but for the norms', which are scaled beforehand) or modules wrapped.

    Args:
        body: A body for which :func:`is_known` holds.
    """

    def __init__(self, body: Any) -> None:  # noqa: ANN401 - a transformers model
        config, attention = body.config, body.layers[0].self_attn
        self._embedding = body.embed_tokens.weight
        self._rotary = body.rotary_emb
        self._norm = _norm(body.norm)
        self._head_dim = attention.head_dim
        self._num_heads, self._num_key_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [_layer(layer, self._num_heads, self._num_key_heads) for layer in body.layers]
        self._sign = self._embedding.new_ones(self._head_dim)
        self._sign[: self._head_dim // 2] = -1
        self._table: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: Bool[Tensor, "batch token key"] | None,
        cache: SlotCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Run the body; see :meth:`~refusion_lit.modeling.interface.LanguageModel.hidden_states`.

        Returns:
            Hidden states; zeros for tokens that the cache was not prepared to store, which are padding.
        """
        # Padding takes part in attention alone: all else is computed for the tokens that are stored.
        rows = _Rows(input_ids.shape, None if cache is None else cache.prepared.source_index)
        # [tokens of all rows, hidden]: one matrix product
        hidden = F.embedding(rows.real_of(input_ids.flatten()), self._embedding)
        rotation = self._rotation(rows.real_of(position_ids.flatten()))
        mask = None
        if attention_mask is not None:
            # Given booleans, attention would make this of them in every layer.
            mask = torch.zeros(attention_mask.shape, dtype=hidden.dtype, device=hidden.device)
            mask = mask.masked_fill_(attention_mask.logical_not(), -torch.inf)[:, None]
        for number, layer in enumerate(self._layers):
            normed = layer.attention_norm(hidden)
            mixed = self._attend(number, layer, normed, rotation, mask, cache, rows)
            hidden.addmm_(mixed, layer.output.t())
            normed = layer.mlp_norm(hidden)
            gated = F.silu(F.linear(normed, layer.gate), inplace=True).mul_(F.linear(normed, layer.up))
            hidden.addmm_(gated, layer.down.t())
        return rows.padded(self._norm(hidden)).view(*input_ids.shape, -1)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [token, 1, dim] of positions [token]."""
        length = int(positions.max()) + 1 if positions.device.type == "cpu" else _MAX_TABLE + 1
        if length > _MAX_TABLE:
            return self._angles(positions)
        if self._table is None or length > len(self._table[0]):
            self._table = self._angles(torch.arange(-(-length // 128) * 128))
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(self._embedding, positions[None])
        return cos.view(-1, 1, self._head_dim), (sin * self._sign).view(-1, 1, self._head_dim)

    def _attend(
        self,
        number: int,
        layer: _Layer,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: SlotCache | None,
        rows: _Rows,
    ) -> Tensor:
        """Return the heads' outputs [tokens of all rows, head * dim]."""
        batch = rows.shape[0]
        num_heads, dim = self._num_heads, self._head_dim
        # Query and key heads side by side: one norm and one rotation for both.
        heads = torch.cat((F.linear(x, *layer.query), F.linear(x, *layer.key)), -1).view(len(x), -1, dim)
        if layer.heads_norm is not None:
            heads = layer.heads_norm(heads)
        cos, sin = rotation
        heads = torch.addcmul(heads * cos, heads.roll(dim // 2, -1), sin)
        query, key = heads[:, :num_heads], heads[:, num_heads:]
        value = F.linear(x, *layer.value).view(len(x), -1, dim)
        if cache is None:
            key, value = key.unflatten(0, (batch, -1)), value.view(batch, -1, *value.shape[1:])
        else:
            key, value = cache.exchange(number, key, value)
        query = rows.padded(query).unflatten(0, (batch, -1)).transpose(1, 2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        grouped = num_heads != self._num_key_heads
        if grouped and x.device.type != "cpu":  # with a mask, only CPUs have a fast kernel for grouped heads
            key, value = (_repeated(states, num_heads // self._num_key_heads) for states in (key, value))
            grouped = False
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=grouped)
        return rows.real_of(mixed.transpose(1, 2).flatten(0, 1)).flatten(1)


def is_known(body: Any) -> bool:  # noqa: ANN401 - a transformers model, or whatever wraps one
    """Say whether :class:`LeanBody` computes what a body computes.

    It must be made of exactly the known classes with plain parameters of one type on one device, unhooked and
    unpatched, with full attention by sdpa, SiLU, rotary frequencies that do not depend on the batch, and no biases but
    those of queries, keys and values. So adapters, quantised or sharded weights and offloading are all refused.
    """
    family = next((family for family in _FAMILIES if family[0] is type(body)), None)
    if family is None or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    weight = body.embed_tokens.weight
    return _is_plain(body, {*family, *_COMMON}, weight.dtype, weight.device) and _is_usual(body)


def _is_plain(module: nn.Module, classes: set[type], dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether a module and all below it are of known classes, as they were made, with plain parameters."""
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
    """Say whether a body's options are those that :class:`LeanBody` computes."""
    config = body.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or ()
    return (
        config._attn_implementation == "sdpa"
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


def _layer(layer: Any, num_heads: int, num_key_heads: int) -> _Layer:  # noqa: ANN401
    attention, mlp = layer.self_attn, layer.mlp
    heads_norm = None
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm, attention.k_norm
        weights = (query.weight.detach().expand(num_heads, -1), key.weight.detach().expand(num_key_heads, -1))
        heads_norm = _Norm(torch.cat(weights), query.variance_epsilon)
    query, key, value = (_linear(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    return _Layer(
        attention_norm=_norm(layer.input_layernorm),
        query=query,
        key=key,
        value=value,
        heads_norm=heads_norm,
        output=attention.o_proj.weight,
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
    )


def _norm(module: Any) -> _Norm:  # noqa: ANN401
    return _Norm(module.weight.detach(), module.variance_epsilon)


def _linear(module: nn.Linear) -> _Linear:
    return module.weight, module.bias


def _repeated(states: Tensor, times: int) -> Tensor:
    """Repeat every key/value head [batch, head, key, dim] for the query heads that share it."""
    return states[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
