"""Adapts a causal language model of transformers to :class:`LanguageModel`."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from refusion_lit.modeling.attention import additive, block_mask
from refusion_lit.modeling.checks import body_of, check_compilable, check_packed, check_supported
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.lean.architectures import is_known
from refusion_lit.modeling.lean.body import LeanBody
from refusion_lit.modeling.lean.compiled import compiled_cache
from refusion_lit.modeling.lora import Adapters
from refusion_lit.types import ModelTraits, SpecialTokens


class Backbone(nn.Module, LanguageModel):
    """A decoder-only transformers model with its body and head called separately.

    Args:
        model: A model with a body and one plain linear head.
        traits: What it was trained to do.
        special_tokens: Its special ids.
        lean: Decode with :class:`~refusion_lit.modeling.lean.body.LeanBody` where the architecture is known, which is
            faster. Other architectures, and training, use the library's forward.
        compile: Compile the lean body's decode steps; see :class:`~refusion_lit.modeling.lean.compiled.CompiledBody`.

    Raises:
        ValueError: If the head is not one plain linear map, a layer's attention cannot take explicit masks, or
            ``compile`` does not go with the other options.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a transformers model, or peft's wrapper around one
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
        self.model, self.traits, self.special_tokens = model, traits, special_tokens
        self.lean, self.compile_steps = lean, compile
        self.max_positions = getattr(model.config, "max_position_embeddings", None)
        self.adapters: Adapters | None = None
        """Options and base of low-rank adapters that the model holds unmerged."""

    @property
    def config(self) -> Any:  # noqa: ANN401 - every architecture has its own config class
        """The transformers config."""
        return self.model.config

    @property
    def body(self) -> nn.Module:
        """The transformer without its head."""
        return body_of(self.model)

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
        # The lean body has no gradients and no autocast.
        if not (torch.is_grad_enabled() or torch.is_autocast_enabled(input_ids.device.type)):
            body = self._lean_body() if cache is None else cache.body
            if body is not None:
                return body(input_ids, position_ids, attention_mask, cache)
        return self._library_states(input_ids, position_ids, attention_mask, cache)

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:  # noqa: D102
        return self.head(hidden)

    def make_cache(self, num_rows: int) -> KVCache:  # noqa: D102
        # Modules may be wrapped or replaced between two generations, but not during one: look at them here, once.
        if self.compile_steps:
            return compiled_cache(self.body, self.config, num_rows, lean=self.lean)
        cache = KVCache(self.config.num_hidden_layers, num_rows)
        cache.body = self._lean_body()
        return cache

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

    def _lean_body(self) -> LeanBody | None:
        body = self.body
        return LeanBody(body) if self.lean and is_known(body) else None

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

    def _library_mask(
        self, mask: Bool[Tensor, "batch token key"] | None, position_ids: Int[Tensor, "batch token"]
    ) -> Tensor | Any:  # noqa: ANN401
        """Return an explicit mask in the form that the attention implementation takes.

        Without mask and cache, transformers takes position ids that do not rise by one for packed sequences and
        silently changes the attention. Two-dimensional ones keep its fast causal path.
        """
        implementation = self.config._attn_implementation
        if mask is None:
            if implementation == "flash_attention_2":
                check_packed(position_ids)
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
