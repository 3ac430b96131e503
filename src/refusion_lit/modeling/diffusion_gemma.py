"""DiffusionGemma without its vision tower: transformers' modules, called with our masks and our KV cache.

The model is an encoder and a decoder with shared weights. The encoder reads the text causally and fills the KV cache;
the decoder reads a canvas bidirectionally after the cached text. Both have layers with a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as library

from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.transformers_forward import LibraryCache, layer_masks
from refusion_lit.modeling.visibility import AttentionMask

VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
"""Prefixes of the weights that read images; they are not loaded."""


class CanvasAttention(library.DiffusionGemmaDecoderTextAttention):
    """The decoder's attention, with the canvas's keys and values where the masks expect them."""

    def append_to_cache(
        self, past_key_values: Cache, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of text and canvas."""
        return past_key_values.update(key_states, value_states, self.layer_idx)


class TextStates(Cache):
    """A text's keys and values in training: the encoder stores them, the decoder only reads them."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401, ARG002 - the signature is transformers'
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's states at the first call; at later calls, append a canvas's states to them."""
        if layer_idx not in self._stored:
            self._stored[layer_idx] = (key_states, value_states)
            return key_states, value_states
        keys, values = self._stored[layer_idx]
        return torch.cat((keys, key_states), -2), torch.cat((values, value_states), -2)


class DiffusionGemmaBody(library.DiffusionGemmaModel):
    """Encoder and decoder without the vision tower.

    :meth:`forward` runs the encoder, with the arguments of any transformer; :meth:`canvas_states` runs the decoder.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - transformers' class
        super().__init__(config)
        del self.encoder.vision_tower, self.encoder.embed_vision
        layers: Any = self.decoder.layers
        for layer in layers:
            layer.self_attn.__class__ = CanvasAttention

    @property
    def window(self) -> int:
        """Number of tokens seen by layers with a sliding window."""
        config: Any = self.config
        return config.text_config.sliding_window

    def forward(  # type: ignore[override]
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: Any = None,  # noqa: ANN401 - a mask in the form that transformers takes
        past_key_values: Cache | None = None,
        use_cache: bool = False,  # noqa: ARG002 - the encoder always fills a cache
    ) -> Any:  # noqa: ANN401 - transformers' output
        """Run the encoder over a text."""
        return self.encoder.language_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )

    def canvas_states(
        self,
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        attention_mask: AttentionMask,
        cache: KVCache | Cache,
        signal: Float[Tensor, "batch token hidden"] | None = None,
    ) -> Float[Tensor, "batch token hidden"]:
        """Run the decoder over canvases.

        Args:
            input_ids: The canvases' tokens.
            position_ids: The canvas tokens' positions in the text.
            attention_mask: What canvases see: the text and the whole canvas. In layers with a sliding window, every
                canvas token sees the text's last ``window - 1`` tokens.
            cache: The text's keys and values.
            signal: Soft embeddings from the previous step's prediction; ``None``: zeros, as in the first step.
        """
        decoder: Any = self.decoder
        masks = layer_masks(self, attention_mask, position_ids, self.window)
        states = decoder.embed_tokens(input_ids)
        states = decoder.self_conditioning(states, torch.zeros_like(states) if signal is None else signal)
        rotary = {kind: decoder.rotary_emb(states, position_ids, kind) for kind in decoder.unique_layer_types}
        for layer, kind in zip(decoder.layers, decoder.text_config.layer_types, strict=True):
            states = layer(
                states,
                position_embeddings=rotary[kind],
                attention_mask=masks[kind],
                position_ids=position_ids,
                past_key_values=LibraryCache(cache) if isinstance(cache, KVCache) else cache,
            )
        return decoder.norm(states)

    def soft_embeddings(self, probabilities: Float[Tensor, "token vocab"]) -> Float[Tensor, "token hidden"]:
        """Return the mean embedding under a distribution over all ids."""
        embedding: Any = self.decoder.embed_tokens
        weight = embedding.weight
        return probabilities.float().to(weight.dtype) @ weight * embedding.embed_scale.to(weight.dtype)

    def train_states(
        self,
        head: Callable[[Tensor], Tensor],
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        visible: Int[Tensor, "batch token range 2"],
        num_canvas: int,
        is_conditioned: Bool[Tensor, " batch"],
    ) -> Float[Tensor, "batch token hidden"]:
        """Run the encoder over texts and the decoder over the canvases behind them, with gradients.

        Self-conditioning takes two decoder passes: the first pass's prediction, which has no gradients,
        conditions the second.

        Args:
            head: Maps hidden states to logits.
            input_ids: Texts, then canvases.
            position_ids: Positions in the text.
            visible: What the tokens see. Texts are always read causally.
            num_canvas: Number of tokens per canvas.
            is_conditioned: Rows with self-conditioning; the others get zeros.
        """
        num_text = input_ids.shape[1] - num_canvas
        cache = TextStates()
        text_positions = position_ids[:, :num_text]
        text = self(input_ids[:, :num_text], text_positions, torch.ones_like(text_positions), cache).last_hidden_state
        canvas = input_ids[:, num_text:], position_ids[:, num_text:], visible[:, num_text:], cache
        with torch.no_grad():
            first = self.canvas_states(*canvas).flatten(0, 1)
            chunks = [self.soft_embeddings(head(states).softmax(-1)) for states in first.split(256)]
            signal = torch.cat(chunks).view(*canvas[0].shape, -1) * is_conditioned[:, None, None].to(first.dtype)
        return torch.cat((text, self.canvas_states(*canvas, signal)), 1)


class DiffusionGemmaForBlockDiffusion(library.DiffusionGemmaForBlockDiffusion):
    """Transformers' model without the vision tower. It has the same name, which saved configs contain."""

    _keys_to_ignore_on_load_unexpected = [rf"^{prefix}" for prefix in VISION]

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - transformers' class
        library.DiffusionGemmaPreTrainedModel.__init__(self, config)
        text = config.text_config
        self.model = DiffusionGemmaBody(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()
