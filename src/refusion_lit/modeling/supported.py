"""Models that the backbone cannot run: it refuses what it would silently compute wrongly."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from refusion_lit.utils.require import require

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
