"""Adapts a transformers causal language model to the :class:`LanguageModel` interface.

The adapter refuses models and options that this package would silently compute wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from refusion_lit.modeling.block_drafter import BlockDrafter
from refusion_lit.modeling.config import check_supported, freeze_frequencies, learns_positions, sliding_window
from refusion_lit.modeling.diffusion_gemma import DiffusionGemmaBody
from refusion_lit.modeling.drafter import Drafter, draft_states
from refusion_lit.modeling.fused.attention import NUM_KEYS
from refusion_lit.modeling.fused.body import FusedBody, check_invariant, is_known
from refusion_lit.modeling.fused.linear import Linear, PackedWeights, dispatch_inference
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import CHUNK, KVCache
from refusion_lit.modeling.logits import ChangedHead, LogitsChange
from refusion_lit.modeling.lora import Adapters
from refusion_lit.modeling.transformers_forward import library_states
from refusion_lit.modeling.visibility import AttentionMask
from refusion_lit.types import ModelTraits, SpecialTokens


class Backbone(nn.Module, LanguageModel):
    """A decoder-only transformers model whose body and LM head are called separately.

    Args:
        model: A model with a body and one plain linear head.
        traits: What the model was trained to do.
        special_tokens: Ids of the tokenizer's special tokens.
        fused_body: Decode with the faster :class:`~refusion_lit.modeling.fused.body.FusedBody` if it knows the
            architecture. Other architectures, and training, use transformers' forward.
        batch_invariant: Decode such that a token's logits do not depend on other tokens of the forward pass.

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
        check_supported(model, get_body(model))
        freeze_frequencies(get_body(model))
        if batch_invariant:
            check_invariant(get_body(model), is_fused=fused_body)
        self.model = model
        self.config = model.config
        self._logits_change = LogitsChange.read(model)
        self.traits = traits
        self.special_tokens = special_tokens
        self.drafter: Drafter | BlockDrafter | None = None
        self.fused_body = fused_body
        self.batch_invariant = batch_invariant
        text_config = model.config.get_text_config()
        self.max_positions = getattr(text_config, "max_position_embeddings", None)
        names = ("image_token_id", "boi_token_id", "eoi_token_id")
        images = (getattr(model.config, name, None) for name in names)
        self.image_token_ids = tuple(token for token in images if token is not None)
        self.learns_positions = learns_positions(model, get_body(model))
        self.window = sliding_window(text_config)
        self.packed = PackedWeights()
        self.new_token_ids: tuple[int, ...] = ()
        """Tokens whose rows were added to pretrained weights at loading, such as a mask token."""
        self.adapters: Adapters | None = None
        """Options and base model of unmerged low-rank adapters."""

    @property
    def body(self) -> nn.Module:
        """The transformer without the LM head."""
        return get_body(self.model)

    @property
    def head(self) -> nn.Linear | ChangedHead:
        """The LM head, including the architecture's scaling or softcap of logits."""
        head = self._linear_head
        return head if self._logits_change is None else ChangedHead(head, self._logits_change, head.weight)

    @property
    def _linear_head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def device(self) -> torch.device:  # noqa: D102
        return self.head.weight.device

    def runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Return a faster :meth:`hidden_states` for one decode. Modules may be replaced between decodes."""
        fused = self.make_fused_body()
        general = partial(library_states, self.body, self.special_tokens.draft_token_ids, window=self.window)
        run = general if fused is None else dispatch_inference(fused, general)
        if isinstance(self.drafter, BlockDrafter):
            return self.drafter.storing_context(run, self.config.num_hidden_layers)
        return run

    def draft_runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]] | None:
        """Return the forward of a block drafter; ``None`` without one."""
        if not isinstance(self.drafter, BlockDrafter):
            return None
        embedding = self.model.get_input_embeddings()
        first_mask = self.special_tokens.draft_token_ids[0]
        return self.drafter.draft_runner(embedding, first_mask, self.config.num_hidden_layers)

    def canvas_runner(self) -> Callable[..., Float[Tensor, "batch token hidden"]]:  # noqa: D102
        body = self.body
        return body.canvas_states if isinstance(body, DiffusionGemmaBody) else super().canvas_runner()

    def soft_embeddings(self, probabilities: Float[Tensor, "token vocab"]) -> Float[Tensor, "token hidden"] | None:  # noqa: D102
        body = self.body
        return body.soft_embeddings(probabilities) if isinstance(body, DiffusionGemmaBody) else None

    def head_runner(self) -> Callable[..., Float[Tensor, "*shape vocab"]]:
        """Return a faster :meth:`logits` for one decode."""
        head, change = self._linear_head, self._logits_change
        is_plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
        if not (is_plain and self.fused_body):
            return self.head
        run = dispatch_inference(
            Linear([head.weight], [head.bias], self.packed, batch_invariant=self.batch_invariant), head
        )
        return run if change is None else ChangedHead(run, change, head.weight)

    @property
    def forward_cost(self) -> float:
        """Fixed cost of a forward pass, in positions of one row.

        The costs are constants, so that decoding does not depend on the machine's load. The CPU constant was fitted to
        SmolLM2-135M on one EPYC thread: fits gave 19 to 36, and 10 to 16 on an EPYC without 16-bit products
        (experiments/lossless). The constant for accelerators is an assumption: there, reading the weights takes most of
        a pass.
        """
        return 32.0 if self.device.type == "cpu" else 256.0

    def _apply(self, *args: Any, **kwargs: Any) -> Backbone:  # noqa: ANN401 - as torch has it
        # Moved or converted weights may reuse memory addresses of old weights.
        self.packed = PackedWeights()
        return super()._apply(*args, **kwargs)

    def make_cache(self, num_rows: int) -> KVCache:  # noqa: D102
        num_layers = self.config.get_text_config().num_hidden_layers
        if isinstance(self.drafter, BlockDrafter):
            num_layers += self.drafter.num_layers
        return KVCache(num_layers, num_rows, NUM_KEYS if self.batch_invariant else CHUNK)

    def forward(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: AttentionMask | None = None,
        num_drafts: int = 0,
        num_canvas: int = 0,
        is_conditioned: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Return hidden states from transformers' forward, with gradients, for training.

        DDP and FSDP intercept ``forward`` only, so training enters here. Arguments are described in
        :meth:`LanguageModel.hidden_states`; the last ``num_drafts`` tokens in every row are draft masks, see
        :func:`~refusion_lit.modeling.drafter.draft_states` and
        :meth:`~refusion_lit.modeling.block_drafter.BlockDrafter.training_states`. The last ``num_canvas`` tokens are a
        canvas, see :meth:`~refusion_lit.modeling.diffusion_gemma.DiffusionGemmaBody.train_states`.
        """
        if torch.is_grad_enabled():
            # After the training step the weights differ, but fused optimizers do not raise torch's version counter.
            self.packed = PackedWeights()
        known = self.special_tokens.draft_token_ids
        text = input_ids.shape[1] - num_drafts
        if isinstance(self.drafter, BlockDrafter) and num_drafts:
            return self.drafter.training_states(self.body, input_ids, position_ids, text)
        if num_drafts:
            assert not isinstance(self.drafter, BlockDrafter)
            return draft_states(self.body, self.drafter, input_ids, position_ids, attention_mask, text, known[0])
        body = self.body
        if num_canvas and isinstance(body, DiffusionGemmaBody):
            assert isinstance(attention_mask, Tensor)
            assert is_conditioned is not None
            return body.train_states(self.head, input_ids, position_ids, attention_mask, num_canvas, is_conditioned)
        return library_states(body, known, input_ids, position_ids, attention_mask, window=self.window)

    def make_fused_body(self) -> FusedBody | None:
        """Return a fused backbone with the current weights; ``None`` if transformers' forward decodes."""
        if not (self.fused_body and is_known(self.body)):
            return None
        drafter = self.drafter if isinstance(self.drafter, Drafter) else None
        return FusedBody(self.body, drafter, self.packed, batch_invariant=self.batch_invariant)


def get_body(model: Any) -> nn.Module:  # noqa: ANN401 - a transformers model, or peft's wrapper around it
    """Return a model's transformer without the LM head."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    prefix = model.base_model_prefix
    return model.get_submodule(prefix if hasattr(model, prefix) else "model")  # Llama 4's text model has another prefix
