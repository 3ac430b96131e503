"""Adapter of a transformers causal language model to the :class:`LanguageModel` interface.

It refuses models and options that this package would silently compute wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from refusion_lit.modeling.config import check_supported, learns_positions, sliding_window
from refusion_lit.modeling.drafter import Drafter, draft_states
from refusion_lit.modeling.fused.attention import NUM_KEYS
from refusion_lit.modeling.fused.body import FusedBody, check_invariant, is_known
from refusion_lit.modeling.fused.linear import Linear, PackedWeights, untraced
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import CHUNK, KVCache
from refusion_lit.modeling.library import library_states
from refusion_lit.modeling.lora import Adapters
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.types import ModelTraits, SpecialTokens


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
            check_invariant(body_of(model), is_fused=fused_body)
        self.model = model
        self.config = model.config
        self.traits = traits
        self.special_tokens = special_tokens
        self.drafter: Drafter | None = None
        self.fused_body = fused_body
        self.batch_invariant = batch_invariant
        self.max_positions = getattr(model.config, "max_position_embeddings", None)
        self.learns_positions = learns_positions(model, body_of(model))
        self.window = sliding_window(model.config)
        """Tokens that sliding-window layers see. Explicit masks have no window, so that it limits the context."""
        if self.window is not None:
            self.max_positions = min(self.window, self.max_positions or self.window)
            self.learns_positions = True
        self.packed = PackedWeights()
        self.adapters: Adapters | None = None
        """Options and base of low-rank adapters that the model holds unmerged."""

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

    def runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Return :meth:`hidden_states` with the modules inspected once: they may be replaced between two decodes."""
        fused = self.make_fused_body()
        general = partial(library_states, self.body, self.special_tokens.draft_token_ids, window=self.window)
        return general if fused is None else untraced(fused, general)

    def head_runner(self) -> Callable[..., Float[Tensor, "*shape vocab"]]:
        """Return :meth:`logits` with the head inspected once."""
        head = self.head
        is_plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
        if not (is_plain and self.fused_body):
            return head
        return untraced(Linear([head.weight], [head.bias], self.packed, batch_invariant=self.batch_invariant), head)

    @property
    def forward_cost(self) -> float:
        """Fixed cost of a forward, in positions of one row.

        Constants, so that forwards do not depend on the machine's load. That of CPUs is of SmolLM2-135M on one thread
        of an AMD EPYC, where fits gave 19 to 36, and 10 to 16 on one without 16-bit products (experiments/lossless).
        That of accelerators is an assumption: there, reading the weights bounds a forward.
        """
        return 32.0 if self.device.type == "cpu" else 256.0

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

        It is the entry point for wrappers that only intercept ``forward`` (DDP, FSDP). For arguments see
        :meth:`LanguageModel.hidden_states`; the last ``num_drafts`` tokens of each row are the draft masks of
        :func:`~refusion_lit.modeling.drafter.draft_states`.
        """
        if torch.is_grad_enabled():
            # A training step follows, and fused optimizers change weights without raising torch's count of changes.
            self.packed = PackedWeights()
        known = self.special_tokens.draft_token_ids
        if num_drafts:
            text = input_ids.shape[1] - num_drafts
            return draft_states(self.body, self.drafter, input_ids, position_ids, attention_mask, text, known[0])
        return library_states(self.body, known, input_ids, position_ids, attention_mask, window=self.window)

    def make_fused_body(self) -> FusedBody | None:
        """Return the fused backbone on the weights as they are now; ``None`` if the library's forward decodes."""
        if not (self.fused_body and is_known(self.body)):
            return None
        return FusedBody(self.body, self.drafter, self.packed, batch_invariant=self.batch_invariant)


def body_of(model: Any) -> nn.Module:  # noqa: ANN401 - a transformers model, or peft's wrapper around it
    """Return a model's transformer without its head."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.get_submodule(model.base_model_prefix)
