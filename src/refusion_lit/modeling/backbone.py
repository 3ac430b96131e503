"""Adapter of a transformers causal language model to the :class:`LanguageModel` interface.

It refuses models and options that this package would silently compute wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from refusion_lit.modeling.attention import additive_mask, block_mask, sdpa_mask
from refusion_lit.modeling.drafter import Drafter
from refusion_lit.modeling.fused.attention import NUM_KEYS
from refusion_lit.modeling.fused.body import FusedBody, is_known
from refusion_lit.modeling.fused.linear import Linear, PackedWeights
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import CHUNK, KVCache
from refusion_lit.modeling.lora import Adapters
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require


class Backbone(nn.Module, LanguageModel):
    """A decoder-only transformers model with its body and head called separately.

    Args:
        model: A model with a body and one plain linear head.
        traits: What it was trained to do.
        special_tokens: Its special ids.
        fused_body: Decode with :class:`~refusion_lit.modeling.fused.body.FusedBody` where the architecture is known,
            which is faster. Other architectures, and training, use the library's forward.
        batch_invariant: Decode so that a token's logits do not depend on what else is in a forward.

    Raises:
        ValueError: If the head is not one plain linear map, or a layer's attention cannot take explicit masks.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a transformers model, or peft's wrapper around one
        traits: ModelTraits,
        special_tokens: SpecialTokens,
        *,
        fused_body: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        check_supported(model, body_of(model))
        if batch_invariant:
            check_invariant(model.config, is_fused=fused_body and is_known(body_of(model)))
        self.model = model
        self.traits = traits
        self.special_tokens = special_tokens
        self.drafter: Drafter | None = None
        self.fused_body = fused_body
        self.batch_invariant = batch_invariant
        self.max_positions = getattr(model.config, "max_position_embeddings", None)
        embeddings = [module for module in body_of(model).modules() if isinstance(module, nn.Embedding)]
        sizes = [each.num_embeddings for each in embeddings if each is not model.get_input_embeddings()]
        self.learns_positions = self.max_positions is not None and max(sizes, default=0) >= self.max_positions
        self.packed = PackedWeights()
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
        attention_mask: AttentionMask | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        return self._states(self.make_fused_body(), input_ids, position_ids, attention_mask, cache)

    def runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Return :meth:`hidden_states` with the modules inspected once: they may be replaced between two decodes."""
        return partial(self._states, self.make_fused_body())

    def _states(
        self,
        body: FusedBody | None,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: AttentionMask | None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        # The fused backbone has no gradients and no autocast.
        is_autocast = torch.is_autocast_enabled(input_ids.device.type)
        if self.batch_invariant and is_autocast and not torch.is_grad_enabled():
            fix = "set precision: 32-true or bf16-true"
            require(False, "batch_invariant", "decoding without autocast", "autocast", fix)
        if body is not None and not (torch.is_grad_enabled() or is_autocast):
            return body(input_ids, position_ids, attention_mask, cache)
        return self._library_states(input_ids, position_ids, attention_mask, cache)

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:  # noqa: D102
        head = self.head
        if not (self.batch_invariant or (self.fused_body and self.packed.takes(head.weight))):
            return head(hidden)
        is_traced = torch.is_grad_enabled() or torch.is_autocast_enabled(hidden.device.type)
        if is_traced or type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
            return head(hidden)
        return Linear(head.weight, head.bias, self.packed, batch_invariant=self.batch_invariant)(hidden)

    def attach(self, drafter: Drafter) -> None:
        """Attach a drafter; its masks get the ids after the embedding's last row.

        Raises:
            ValueError: If the model decodes with transformers' forward, which cannot apply the adapters to masks only.
        """
        has_gate = self.fused_body and is_known(self.body)
        expected = "a Llama, Qwen2 or Qwen3 model decoded with fused_body: true"
        got = f"{type(self.body).__name__}, fused_body: {self.fused_body}"
        require(has_gate, "drafter", expected, got, "change these options, or leave the drafter out")
        first = self.model.get_input_embeddings().weight.shape[0]
        masks = tuple(range(first, first + drafter.origin.options.num_masks))
        self.drafter = drafter
        self.special_tokens = replace(self.special_tokens, draft_token_ids=masks)

    def _apply(self, *args: Any, **kwargs: Any) -> Backbone:  # noqa: ANN401 - as torch has it
        # Moved or converted weights may reuse memory addresses of old ones.
        self.packed = PackedWeights()
        return super()._apply(*args, **kwargs)

    def make_cache(self, num_rows: int) -> KVCache:  # noqa: D102
        return KVCache(self.config.num_hidden_layers, num_rows, NUM_KEYS if self.batch_invariant else CHUNK)

    def forward(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: AttentionMask | None = None,
        num_drafts: int = 0,
    ) -> Float[Tensor, "batch token hidden"]:
        """Return hidden states computed by the library's forward, with gradients, for training.

        It is the entry point for wrappers that only intercept ``forward`` (DDP, FSDP).

        Args:
            input_ids: Tokens in sequence order.
            position_ids: Position of each token in the final text.
            attention_mask: Which token sees which, as a matrix or as ranges of tokens; ``None``: causal.
            num_drafts: The last tokens of each row are draft masks. The tokens before them run first, causally, without
                gradients and without the drafter; the masks then see them by their keys and values.
        """
        if torch.is_grad_enabled():
            # A training step follows, and fused optimizers change weights without raising torch's count of changes.
            self.packed = PackedWeights()
        if num_drafts:
            return self._draft_states(input_ids, position_ids, attention_mask, num_drafts)
        return self._library_states(input_ids, position_ids, attention_mask, None)

    def _draft_states(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: AttentionMask | None, num_drafts: int
    ) -> Tensor:
        assert self.drafter is not None
        assert isinstance(attention_mask, Tensor)
        num_keys = input_ids.shape[1]
        length = num_keys - num_drafts
        with torch.no_grad():
            text = self.body(
                input_ids=input_ids[:, :length],
                position_ids=position_ids[:, :length],
                attention_mask=torch.ones_like(input_ids[:, :length]),
                use_cache=True,
            )
        masks = self.drafter.masks[(input_ids[:, length:] - self.special_tokens.draft_token_ids[0]).clamp(min=0)]
        with self.drafter.applied(self.body):
            drafts = self.body(
                inputs_embeds=masks.to(self.dtype),
                position_ids=position_ids[:, length:],
                attention_mask=self._library_mask(attention_mask[:, length:], position_ids[:, length:], num_keys),
                past_key_values=text.past_key_values,
                use_cache=True,
            )
        return torch.cat((text.last_hidden_state, drafts.last_hidden_state), 1)

    def make_fused_body(self) -> FusedBody | None:
        """Return the fused backbone on the weights as they are now; ``None`` if the library's forward decodes."""
        body = self.body
        if not (self.fused_body and is_known(body)):
            return None
        if self.batch_invariant:
            require(
                self.device.type == "cpu", "batch_invariant", "a model on the CPU", str(self.device), "leave it out"
            )
        return FusedBody(body, self.drafter, self.packed, batch_invariant=self.batch_invariant)

    def _library_states(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: AttentionMask | None, cache: KVCache | None
    ) -> Tensor:
        # On a GPU the host would have to wait for this check.
        if self.drafter is not None and input_ids.device.type == "cpu":
            has_masks = bool((input_ids >= self.special_tokens.draft_token_ids[0]).any())
            require(not has_masks, "drafter", "decoding without autocast", "autocast", "set precision: 32-true")
        output = self.body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._library_mask(attention_mask, position_ids, input_ids.shape[1]),
            past_key_values=None if cache is None else cache.past_key_values,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def _library_mask(
        self,
        mask: AttentionMask | None,
        position_ids: Int[Tensor, "batch token"],
        num_keys: int,
    ) -> Tensor | Any:  # noqa: ANN401
        """Return an explicit mask in the form that the attention implementation takes.

        Without mask and cache, transformers takes position ids that do not rise by one for packed sequences and
        silently changes the attention. Two-dimensional ones keep its fast causal path.
        """
        implementation = self.config._attn_implementation
        if mask is None:
            return torch.ones_like(position_ids)
        if implementation == "flex_attention":
            return block_mask(mask, num_keys, position_ids.device)
        if implementation == "sdpa":
            return sdpa_mask(mask, num_keys, position_ids.device)
        if implementation == "eager":
            return additive_mask(mask, num_keys, self.dtype, position_ids.device)
        raise ValueError(
            f"attn_implementation: {implementation!r} cannot take the mask that this pattern or decoder needs; "
            "use 'sdpa', 'eager' or 'flex_attention'."
        )


def body_of(model: Any) -> nn.Module:  # noqa: ANN401 - a transformers model, or peft's wrapper around it
    """Return a model's transformer without its head."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.get_submodule(model.base_model_prefix)


_SUPPORTED = "use a model such as Llama, Qwen2 or Qwen3"
_HEAD_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier_scale",
    "lm_head_multiplier",
)


def check_supported(model: Any, body: nn.Module) -> None:  # noqa: ANN401 - a transformers model, or peft's wrapper
    """Refuse models whose logits or attention the adapter would change.

    Args:
        model: The model.
        body: Its transformer without the head.

    Raises:
        ValueError: With the reason.
    """
    config = model.config
    name = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"backbone: {name} has no plain linear head (found {type(head).__name__}); {_SUPPORTED}.")
    for option in _HEAD_CHANGES:
        if getattr(config, option, None) not in (None, 1, 1.0):
            raise ValueError(
                f"backbone: {name} changes its logits after the head ({option}={getattr(config, option)!r}), "
                "but logits are computed from the head alone here; use a model with a plain head."
            )
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise ValueError(f"backbone: {name} takes no position ids, but tokens are reordered here; {_SUPPORTED}.")
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


def check_invariant(config: Any, *, is_fused: bool) -> None:  # noqa: ANN401 - one class per architecture
    """Refuse models and options for which ``batch_invariant`` cannot be kept.

    Raises:
        ValueError: Naming the option.
    """
    fix = "change that, or leave batch_invariant out"
    expected = "an unadapted Llama, Qwen2 or Qwen3 model with fused_body: true and attn_implementation: sdpa"
    body = "" if is_fused else ", not decoded by the fused backbone"
    got = f"{config.model_type} with attn_implementation: {config._attn_implementation}{body}"
    require(is_fused and config._attn_implementation == "sdpa", "batch_invariant", expected, got, fix)
    # torch rounds the last elements of a tensor differently if they do not fill a vector register of the processor.
    widths = config.hidden_size, config.intermediate_size
    require(all(width % 32 == 0 for width in widths), "batch_invariant", "widths that are multiples of 32", widths, fix)
