"""Forward passes by transformers' code: in training, and in decoding without the fused body.

Masks are explicit, in the form required by the attention implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from refusion_lit.modeling.attention import CHUNK, RangeMask, block_mask
from refusion_lit.modeling.devices import to_device
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import AttentionMask, Visibility, as_mask, ranges_mask
from refusion_lit.utils.require import require


def library_states(
    body: nn.Module,
    draft_token_ids: Sequence[int],
    input_ids: Int[Tensor, "batch token"],
    position_ids: Int[Tensor, "batch token"],
    attention_mask: AttentionMask | None,
    cache: KVCache | None = None,
    outputs: dict[int, Tensor] | None = None,
    *,
    window: int | None = None,
) -> Float[Tensor, "batch token hidden"]:
    """Run a transformer without its head; for arguments see :meth:`LanguageModel.hidden_states`.

    The keys of ``outputs`` are layer numbers; it receives these layers' outputs [token, hidden] for the tokens that the
    cache stores. The last layer's output includes the final norm.

    Raises:
        ValueError: If tokens out of text order reach beyond a sliding ``window``, if a drafter's mask
            (``draft_token_ids``) is among the tokens, or if the attention implementation cannot take the mask.
    """
    # Not on a GPU: the host would have to wait for the result.
    if draft_token_ids and input_ids.device.type == "cpu":
        has_masks = bool((input_ids >= draft_token_ids[0]).any())
        got = f"autocast, or a {type(body).__name__} that is wrapped, hooked or sharded"
        fix = "set precision: 32-true, or export the checkpoint and decode the directory"
        require(not has_masks, "drafter", "decoding by the fused backbone", got, fix)
    length = 0 if window is None or attention_mask is None else int(position_ids.max()) + 1
    if window is not None and length > window:
        mask = windowed_mask(body, attention_mask, position_ids, window)
    else:
        mask = library_mask(body, attention_mask, position_ids, input_ids.shape[1])
    output = body(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=mask,
        past_key_values=None if cache is None else LibraryCache(cache),
        use_cache=cache is not None,
        **({} if outputs is None else {"output_hidden_states": True}),
    )
    if outputs is not None:
        stored = None if cache is None else cache.source_index
        for layer in outputs:
            states = output.hidden_states[layer + 1].flatten(0, 1)
            outputs[layer] = states if stored is None else states[stored]
    return output.last_hidden_state


def library_mask(
    body: Any,  # noqa: ANN401 - a transformers model without its head
    mask: AttentionMask | None,
    position_ids: Int[Tensor, "batch token"],
    num_keys: int,
) -> Any:  # noqa: ANN401 - a tensor or a BlockMask
    """Return an explicit mask in the form required by the attention implementation.

    Without mask and cache, transformers interprets position ids with gaps as packed sequences and silently changes the
    attention. A two-dimensional mask of ones prevents this and keeps the fast causal path.

    Raises:
        ValueError: If the attention implementation cannot take the mask.
    """
    implementation = body.config._attn_implementation
    if mask is None:
        return torch.ones_like(position_ids)
    if implementation == "flex_attention":
        return block_mask(mask, num_keys, position_ids.device)
    if implementation == "sdpa":
        return sdpa_mask(mask, num_keys, position_ids.device)
    if implementation == "eager":  # which adds the mask to the scores, a bool mask as 0 and 1
        visible = as_mask(mask, position_ids.device, num_keys)[:, None]
        return torch.zeros(visible.shape, dtype=body.dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(body.dtype).min
        )
    raise ValueError(
        f"attn_implementation: {implementation!r} cannot take the mask that this pattern or decoder needs; "
        "use 'sdpa' or 'flex_attention'."
    )


def sdpa_mask(attention: AttentionMask, num_keys: int, device: torch.device) -> Tensor:
    """Convert a mask for :func:`torch.nn.functional.scaled_dot_product_attention`, and add an axis for heads.

    Ranges of long sequences become a :class:`RangeMask` on CPUs. Accelerators get the matrix, because
    flex attention, which is fast there, does not use this function.
    """
    if isinstance(attention, Tensor) and attention.ndim == 4 and device.type == "cpu" and num_keys > 2 * CHUNK:
        return attention.as_subclass(RangeMask)
    return as_mask(attention, device, num_keys)[:, None]


def windowed_mask(
    body: Any,  # noqa: ANN401 - a transformers model without its head
    mask: AttentionMask | None,
    position_ids: Int[Tensor, "batch token"],
    window: int,
) -> Any:  # noqa: ANN401 - a mask, or masks by type of layer
    """Return explicit masks for a text longer than the model's sliding window.

    Returns:
        A mask per type of layer; a single mask if all layers have the window.

    Raises:
        ValueError: If tokens may be cached out of text order: the window is then no range of cache indices.
    """
    in_order = isinstance(mask, Visibility) and all(
        position_ids[span.sequence, span.offset : span.offset + span.length].tolist()
        == [*range(span.first_key, span.first_key + span.length)]
        for span in mask.spans
    )
    expected = f"at most {window} tokens, the sliding window of {type(body).__name__}"
    fix = "shorten the text, or take a model with full attention"
    require(in_order, "context", expected, int(position_ids.max()) + 1, fix)
    assert isinstance(mask, Visibility)
    masks = layer_masks(body, mask, position_ids, window)
    has_types = bool(getattr(body.config.get_text_config(), "layer_types", None))
    return masks if has_types else masks["sliding_attention"]


def layer_masks(
    body: Any,  # noqa: ANN401 - a transformers model without its head
    mask: AttentionMask,
    position_ids: Int[Tensor, "batch token"],
    window: int,
) -> dict[str, Any]:
    """Return explicit masks for two types of layers: full attention and sliding window.

    Args:
        body: The transformer.
        mask: What tokens see, as spans or as ranges; keys are in text order.
        position_ids: The tokens' positions. With ranges, all tokens share the window of the first token.
        window: Number of tokens seen by layers with a sliding window.

    Raises:
        ValueError: If the attention implementation cannot take the mask.
    """
    if isinstance(mask, Visibility):
        num_keys, device = mask.num_keys, position_ids.device
        whole, sliding = (ranges_mask(to_device(mask.ranges(size), device), num_keys) for size in (None, window))
    else:
        num_keys = int(mask[..., 1].max())
        low = position_ids[:, :1, None] - window + 1
        whole, sliding = mask, torch.stack((mask[..., 0].maximum(low), mask[..., 1]), -1)
    masks = [library_mask(body, ranges, position_ids, num_keys) for ranges in (whole, sliding)]
    return dict(zip(("full_attention", "sliding_attention"), masks, strict=True))


class LibraryCache(Cache):
    """Lets transformers' forward write to and read from a :class:`KVCache`.

    The cache has no layers, so its length is 0: masks and positions are explicit, never derived from a length.

    Args:
        storage: The storage.
        first_layer: Number of the network's first layer in the storage.
    """

    def __init__(self, storage: KVCache, first_layer: int = 0) -> None:
        super().__init__(layers=[])
        self._storage = storage
        self._first_layer = first_layer

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401, ARG002 - the signature is transformers'
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's [sequence, head, token, dim] states; return the keys and values that queries may see."""
        storage = self._storage
        flat = [states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states)]
        if storage.source_index is not None:
            flat = [states[storage.source_index] for states in flat]
        keys, values = storage.store(self._first_layer + layer_idx, *flat)
        visible = storage.rows, slice(storage.num_keys)
        return keys[visible].transpose(1, 2), values[visible].transpose(1, 2)
