"""Fused backbone: a forward pass for known architectures with far fewer operations per layer.

Small models spend most of a forward pass in calls, not in arithmetic. :class:`FusedBody` runs Qwen2, Qwen3 and Llama
bodies on the model's parameters and calls only the rotary embedding's ``forward``. If it does not support a body in
every detail, :class:`~refusion_lit.modeling.backbone.Backbone` runs the library's forward pass. Results are equal up to
rounding, not bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from refusion_lit.modeling.drafter import Drafter, DraftMasks
from refusion_lit.modeling.fused.attention import RowAttention, Rows, plan_attention
from refusion_lit.modeling.fused.linear import Linear, PackedWeights
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.utils.require import require

_MAX_TABLE = 1 << 14
"""Maximum number of positions with cached angles. Only CPUs cache them: a GPU's host would wait for positions."""


class _Norm:
    """Root-mean-square normalisation over the last axis, in float32 for every type, as in the library."""

    __slots__ = ("_by_hand", "_eps", "_floor", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        # On CPUs the norm of a vector is a single fast operation, and torch's rms_norm is five operations.
        self._by_hand = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._eps = eps
        self._floor = weight.new_tensor((size * eps) ** 0.5)
        self._weight = weight * size**0.5 if self._by_hand else weight.clone()

    def __call__(self, x: Tensor) -> Tensor:
        if self._by_hand:  # w x / sqrt(|x|^2 / size + eps)
            root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
            return x.div(root).mul_(self._weight)
        if x.dtype == torch.float64:  # the library's operations one by one, so that all roundings are equal
            rounded = x.float()
            rounded = rounded * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + self._eps)
            return rounded.to(x.dtype).mul_(self._weight)
        return F.rms_norm(x, x.shape[-1:], None, self._eps).mul_(self._weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights; ``heads`` are queries, keys and values, ``heads_norm`` is Qwen3's norm of queries and keys."""

    attention_norm: _Norm
    heads: Linear
    heads_norm: _Norm | None
    output: Linear
    mlp_norm: _Norm
    gate_and_up: Linear
    down: Linear


class FusedBody:
    """A body's forward pass over the body's parameters, without gradients.

    The object refers to the modules' tensors at construction, and copies some tensors. Make a new object after changing
    or replacing weights, or wrapping modules.

    Args:
        body: A body for which :func:`~refusion_lit.modeling.fused.body.is_known` is true.
        drafter: Acts at draft masks, whose ids follow the embedding's last id. Other tokens use the body alone.
        packed: Keeps copies of weights in a layout that is faster on CPUs; ``None``: no copies.
        batch_invariant: Make a token's results independent of the rest of the forward pass; on CPUs.

    Raises:
        ValueError: If ``batch_invariant`` is set on another device, or under autocast.
    """

    def __init__(
        self,
        body: Any,  # noqa: ANN401 - a transformers model
        drafter: Drafter | None = None,
        packed: PackedWeights | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        config = body.config
        attention = body.layers[0].self_attn
        self._embedding = body.embed_tokens.weight
        if batch_invariant:
            device = self._embedding.device.type
            require(device == "cpu", "batch_invariant", "a model on the CPU", device, "leave it out")
            is_exact = not torch.is_autocast_enabled(device)
            fix = "set precision: 32-true or bf16-true"
            require(is_exact, "batch_invariant", "decoding without autocast", "autocast", fix)
        self._rotary = body.rotary_emb
        self._norm = _norm(body.norm)
        self._head_dim = attention.head_dim
        self._num_heads = config.num_attention_heads
        self._num_key_heads = config.num_key_value_heads
        self._batch_invariant = batch_invariant
        linear = partial(_linear, packed=packed, batch_invariant=batch_invariant)
        self._layers = [_layer(layer, self._num_heads, self._num_key_heads, linear) for layer in body.layers]
        self._sign = self._embedding.new_ones(self._head_dim)
        self._sign[: self._head_dim // 2] = -1
        self._table: tuple[Tensor, Tensor] | None = None
        self._drafts = None if drafter is None else DraftMasks(drafter, self._embedding, len(self._layers))

    def __call__(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: AttentionMask | None,
        cache: KVCache | None = None,
        outputs: dict[int, Tensor] | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Run the body; see :meth:`~refusion_lit.modeling.interface.LanguageModel.hidden_states`.

        ``outputs`` is described in :func:`~refusion_lit.modeling.transformers_forward.library_states`.

        Returns:
            Hidden states; zeros for padding, which the cache does not store.
        """
        # Only attention includes padding: everything else is computed for the stored tokens only.
        rows = Rows(input_ids.shape, None if cache is None else cache.source_index)
        rotation = self._rotation(rows.select_real(position_ids.flatten()))
        attention = plan_attention(rows, attention_mask, cache, self._embedding, batch_invariant=self._batch_invariant)
        hidden = self._run(rows.select_real(input_ids.flatten()), rotation, attention, outputs or {})
        return rows.pad(hidden)

    def _run(
        self,
        ids: Int[Tensor, " token"],
        rotation: tuple[Tensor, Tensor],
        attention: RowAttention,
        outputs: dict[int, Tensor],
    ) -> Float[Tensor, "token hidden"]:
        """Run the layers over all rows' tokens, concatenated, so that all rows share matrix products.

        Args:
            ids: The tokens.
            rotation: Result of :meth:`_angles` for the tokens' positions.
            attention: Attention in the forward pass.
            outputs: Its keys are layer numbers; it receives these layers' outputs.
        """
        drafts = self._drafts
        masks = None if drafts is None else drafts.gate(ids)
        hidden = F.embedding(ids, self._embedding) if masks is None else masks.embed(ids)
        for number, layer in enumerate(self._layers):
            normed = layer.attention_norm(hidden)
            heads = layer.heads(normed)
            if masks is not None:
                masks.add(number, "attention", normed, heads)
            mixed = attention(number, *self._rotate(layer, heads, rotation)).flatten(1)
            layer.output.add_to(hidden, mixed)
            if masks is not None:
                masks.add(number, "output", mixed, hidden)
            normed = layer.mlp_norm(hidden)
            both = layer.gate_and_up(normed)
            if masks is not None:
                masks.add(number, "mlp", normed, both)
            gate, up = both.chunk(2, -1)
            gated = F.silu(gate).mul_(up)
            layer.down.add_to(hidden, gated)
            if masks is not None:
                masks.add(number, "down", gated, hidden)
            if number in outputs:
                outputs[number] = hidden.clone()  # the next layer adds to it in place
        hidden = self._norm(hidden)
        if len(self._layers) - 1 in outputs:
            outputs[len(self._layers) - 1] = hidden
        return hidden

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [token, 1, dim] for positions [token]."""
        length = int(positions.max()) + 1 if positions.device.type == "cpu" else _MAX_TABLE + 1
        if length > _MAX_TABLE:
            return self._angles(positions)
        if self._table is None or length > self._table[0].shape[0]:
            self._table = self._angles(torch.arange(-(-length // 128) * 128))
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _angles(self, positions: Int[Tensor, " token"]) -> tuple[Tensor, Tensor]:
        """Compute cosines and signed sines [token, 1, dim] for positions."""
        cos, sin = self._rotary(self._embedding, positions[None])
        return cos.view(-1, 1, self._head_dim), (sin * self._sign).view(-1, 1, self._head_dim)

    def _rotate(
        self, layer: _Layer, heads: Float[Tensor, "token width"], rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, each [token, head, dim]."""
        num_heads = self._num_heads
        num_key_heads = self._num_key_heads
        heads = heads.view(heads.shape[0], -1, self._head_dim)
        # Tensor.split would take three times as long: it is a function of Python.
        heads, value = heads.split_with_sizes((num_heads + num_key_heads, num_key_heads), 1)
        if layer.heads_norm is not None:
            heads = layer.heads_norm(heads)
        cos, sin = rotation
        heads = torch.addcmul(heads * cos, heads.roll(self._head_dim // 2, -1), sin)
        query, key = heads.split_with_sizes((num_heads, num_key_heads), 1)
        return query, key, value


def _linear(*modules: nn.Linear, packed: PackedWeights | None, batch_invariant: bool) -> Linear:
    weights, biases = zip(*((module.weight, module.bias) for module in modules), strict=True)
    return Linear(weights, biases, packed, batch_invariant=batch_invariant)


def _layer(layer: Any, num_heads: int, num_key_heads: int, linear: Callable[..., Linear]) -> _Layer:  # noqa: ANN401
    """Return the fused form of a transformer layer. ``linear`` joins several linear layers into one product."""
    attention = layer.self_attn
    mlp = layer.mlp
    heads_norm = None
    if hasattr(attention, "q_norm"):
        query = attention.q_norm
        key = attention.k_norm
        weights = (query.weight.detach().expand(num_heads, -1), key.weight.detach().expand(num_key_heads, -1))
        heads_norm = _Norm(torch.cat(weights), query.variance_epsilon)

    return _Layer(
        attention_norm=_norm(layer.input_layernorm),
        heads=linear(attention.q_proj, attention.k_proj, attention.v_proj),
        heads_norm=heads_norm,
        output=linear(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_and_up=linear(mlp.gate_proj, mlp.up_proj),
        down=linear(mlp.down_proj),
    )


def _norm(module: Any) -> _Norm:  # noqa: ANN401
    return _Norm(module.weight.detach(), module.variance_epsilon)


_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the batch."""

_PARTS = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_FAMILIES: list[list[type[nn.Module]]] = [
    [getattr(module, name + part) for part in _PARTS]
    for name, module in (("Qwen3", qwen3), ("Qwen2", qwen2), ("Llama", llama))
]
"""An architecture's classes, with the body's class first."""

_COMMON: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, type(ACT2FN["silu"]))


def is_known(body: Any) -> bool:  # noqa: ANN401 - a transformers model, or a wrapper of one
    """Return whether :class:`~refusion_lit.modeling.fused.body.FusedBody` computes what a body computes.

    The body must consist of the known classes, without hooks or patches, with plain parameters that share a type and a
    device. It must have SiLU, rotary frequencies that do not depend on the batch, biases in queries, keys and values
    only, and full attention by sdpa or (in training) flex attention. Adapters, quantised or sharded weights and
    offloading are therefore not supported.
    """
    family = next((family for family in _FAMILIES if family[0] is type(body)), None)
    if family is None or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    weight = body.embed_tokens.weight
    return _is_plain(body, {*family, *_COMMON}, weight.dtype, weight.device) and _is_usual(body)


def check_invariant(body: Any, *, is_fused: bool) -> None:  # noqa: ANN401 - a transformers model
    """Refuse models and options that do not support ``batch_invariant``.

    Raises:
        ValueError: Naming the option.
    """
    config = body.config
    is_fused = is_fused and is_known(body)
    fix = "change these options, or leave batch_invariant out"
    expected = "an unadapted Llama, Qwen2 or Qwen3 model with fused_body: true and attn_implementation: sdpa"
    reason = "" if is_fused else ", not decoded by the fused backbone"
    got = f"{config.model_type} with attn_implementation: {config._attn_implementation}{reason}"
    require(is_fused and config._attn_implementation == "sdpa", "batch_invariant", expected, got, fix)
    # torch rounds a tensor's last elements differently if they do not fill a vector register of the processor.
    widths = config.hidden_size, config.intermediate_size
    require(all(width % 32 == 0 for width in widths), "batch_invariant", "widths that are multiples of 32", widths, fix)


def _is_plain(module: nn.Module, classes: set[type], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a module and its submodules are unmodified, have known classes and plain parameters."""
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
    """Return whether :class:`~refusion_lit.modeling.fused.body.FusedBody` supports a body's options."""
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
    attention = layer.self_attn
    mlp = layer.mlp
    others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        all(linear.bias is None for linear in others)
        and attention.scaling == attention.head_dim**-0.5
        and not (drops and attention.attention_dropout)
    )
