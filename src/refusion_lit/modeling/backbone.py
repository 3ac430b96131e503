"""The adapter over transformers' causal language models, the only place that knows them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from refusion_lit.modeling.attention import additive, block_mask
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.lean.architectures import is_known
from refusion_lit.modeling.lean.body import LeanBody
from refusion_lit.modeling.lean.compiled import CompiledBody, compiled_body
from refusion_lit.types import ModelTraits, SpecialTokens

_HEAD_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier_scale",
    "lm_head_multiplier",
)


class Backbone(nn.Module, LanguageModel):
    """A causal transformers model as a :class:`LanguageModel`.

    Args:
        model: Any decoder-only model with a body and one plain linear head.
        traits: What it was trained to do.
        special_tokens: Its ids with a meaning.
        lean: Decode with :class:`~refusion_lit.modeling.lean.body.LeanBody` where it knows the architecture, which is
            faster; anything else, and training, runs by the library's forward.
        compile: Compile the lean body's decode steps; see :class:`~refusion_lit.modeling.lean.compiled.CompiledBody`.

    Raises:
        ValueError: If the head is not one plain linear map, a layer's attention cannot be replaced by our masks, or
            ``compile`` does not go with the other options.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        special_tokens: SpecialTokens,
        *,
        lean: bool = True,
        compile: bool = False,
    ) -> None:
        super().__init__()
        check_supported(model)
        if compile:
            check_compilable(lean=lean, attn_implementation=model.config._attn_implementation)
        self.model = model
        self.lean = lean
        self.compile_steps = compile
        self.traits = traits
        self.special_tokens = special_tokens

    @property
    def config(self) -> Any:  # noqa: ANN401 - every architecture has its own config class
        """The transformers config."""
        return self.model.config

    @property
    def body(self) -> nn.Module:
        """The transformer without its head."""
        return _body(self.model)

    @property
    def head(self) -> nn.Linear:
        """The linear head."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def device(self) -> torch.device:  # noqa: D102
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        return self.head.weight.dtype

    def hidden_states(  # noqa: D102
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: Bool[Tensor, "batch token key"] | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        if not (torch.is_grad_enabled() or torch.is_autocast_enabled(input_ids.device.type)):
            lean = self._lean_body() if cache is None else cache.lean
            if lean is not None:
                return lean(input_ids, position_ids, attention_mask, cache)
        return self._library_states(input_ids, position_ids, attention_mask, cache)

    def _library_states(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        output = self.body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._library_mask(attention_mask, position_ids),
            past_key_values=None if cache is None else cache.past_key_values,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:  # noqa: D102
        return self.head(hidden)

    def make_cache(self, num_rows: int) -> KVCache:  # noqa: D102
        cache = KVCache(self.config.num_hidden_layers, num_rows, static=self.compile_steps)
        # Modules may be wrapped or replaced between two generations, but not during one.
        if self.compile_steps:
            compiled = self._compiled_body()
            compiled.lend(cache)
            cache.lean = compiled
        else:
            cache.lean = self._lean_body()
        return cache

    def _lean_body(self) -> LeanBody | None:
        body = self.body
        return LeanBody(body) if self.lean and is_known(body) else None

    def _compiled_body(self) -> CompiledBody:
        check_compilable(lean=self.lean, attn_implementation=self.config._attn_implementation)
        if not is_known(self.body):
            raise ValueError(
                "backbone.compile: expected a model that the lean body knows (Qwen2, Qwen3 or Llama, its weights "
                f"neither adapted nor quantised nor sharded), got {type(self.body).__name__} as it is now; decode with "
                "compile: false."
            )
        return compiled_body(self.body)

    def forward(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: Bool[Tensor, "batch token key"] | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Return hidden states by the library's forward, as training needs them.

        The entry point for wrappers that only intercept ``forward`` (DDP, FSDP).
        """
        return self._library_states(input_ids, position_ids, attention_mask, None)

    def _library_mask(
        self, mask: Bool[Tensor, "batch token key"] | None, position_ids: Int[Tensor, "batch token"]
    ) -> Tensor | Any:  # noqa: ANN401
        """Give transformers a mask in every case.

        Without mask and cache it takes position ids that do not rise by one for packed sequences and silently
        changes the attention. All ones in two dimensions keep its fast causal path. With flash attention it
        looks at a single row's position ids whatever the mask.
        """
        implementation = self.config._attn_implementation
        if mask is None:
            if implementation == "flash_attention_2" and len(position_ids) == 1:
                _refuse_packed(position_ids)
            return torch.ones_like(position_ids)
        four_d = rearrange(mask, "batch token key -> batch 1 token key")
        if implementation == "sdpa":
            return four_d
        if implementation == "eager":
            return additive(four_d, self.dtype)
        if implementation == "flex_attention":
            return block_mask(mask)
        raise ValueError(
            f"attn_implementation: {implementation!r} cannot take the mask that this pattern or decoder needs; "
            "use 'sdpa', 'eager' or 'flex_attention'."
        )


def _body(model: Any) -> nn.Module:  # noqa: ANN401 - a transformers model, or peft's wrapper around it
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.get_submodule(model.base_model_prefix)


def _refuse_packed(position_ids: Int[Tensor, "1 token"]) -> None:
    if not bool((position_ids.diff() == 1).all()):
        raise ValueError(
            "attn_implementation: 'flash_attention_2' takes a single row whose position ids do not rise by one for "
            "packed sequences and changes its attention; use a batch size of at least 2, or 'sdpa', 'eager' or "
            "'flex_attention'."
        )


def check_compilable(*, lean: bool, attn_implementation: str | None) -> None:
    """Refuse what the compiled decode step does not go with.

    Raises:
        ValueError: Naming the option.
    """
    if not lean:
        raise ValueError(
            "backbone.compile: expected lean: true, got false, but only the lean body is compiled; set lean: true, or "
            "compile: false."
        )
    if attn_implementation != "sdpa":
        raise ValueError(
            f"backbone.compile: expected attn_implementation: sdpa, got {attn_implementation!r}, but the compiled "
            "step has attention of its own over static shapes; set attn_implementation: sdpa, or compile: false."
        )


def check_supported(model: PreTrainedModel) -> None:
    """Refuse models whose logits or attention this adapter would silently change.

    Raises:
        ValueError: With the reason.
    """
    config = model.config
    name = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"backbone: {name} has no plain linear head (found {type(head).__name__}); use another model.")
    for option in _HEAD_CHANGES:
        if getattr(config, option, None) not in (None, 1, 1.0):
            raise ValueError(
                f"backbone: {name} changes its logits after the head ({option}={getattr(config, option)!r}), "
                "but logits are computed from the head alone here; use a model with a plain head."
            )
    if "position_ids" not in inspect.signature(_body(model).forward).parameters:
        raise ValueError(f"backbone: {name} takes no position ids, but tokens are moved here; use another model.")
    layer_types = getattr(config, "layer_types", None) or []
    if not layer_types and getattr(config, "sliding_window", None) is not None:
        layer_types = ["sliding_attention"]
    other = sorted({kind for kind in layer_types if kind != "full_attention"})
    if other:
        raise ValueError(
            f"backbone: {name} has layers of type {', '.join(other)}, which explicit masks would turn into full "
            "attention; use a model with full attention in every layer, or override it with full attention "
            "(for example config: {sliding_window: null})."
        )
