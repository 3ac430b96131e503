"""Log-likelihood of a text under an autoregressive model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from refusion_lit.modeling.backbone import Backbone


def check(backbone: Backbone, *, allow_mismatch: bool = False) -> None:
    """Refuse a model whose likelihoods are not those of its next tokens.

    Args:
        backbone: The model.
        allow_mismatch: Only warn if a causal model was trained for other predictions.

    Raises:
        ValueError: With the reason.
    """
    traits = backbone.traits
    fix = "compare it by tasks that generate"
    if traits.attention != "causal":
        raise ValueError(f"likelihood: expected a causal model, got one with {traits.attention} attention; {fix}.")
    if traits.predictions is None or "next_token" in traits.predictions:
        return
    trained = ", ".join(traits.predictions) or "nothing"
    reason = f"likelihood: expected a model trained for next_token, got one trained for {trained}"
    if not allow_mismatch:
        raise ValueError(f"{reason}; {fix}, or set allow_mismatch: true to compute it anyway.")
    warnings.warn(reason, stacklevel=2)


@torch.no_grad()
def autoregressive(backbone: Backbone, context: Sequence[int], text: Sequence[int]) -> tuple[float, bool]:
    """Return the exact log-probability of a text's tokens, each given all tokens before it, in nats.

    Args:
        backbone: A causal model that predicts the next token.
        context: Tokens before the text, at least one.
        text: Tokens of the text.

    Returns:
        The sum over the text's tokens, and whether each of them is the most probable one.
    """
    ids = torch.tensor([[*context, *text]], device=backbone.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = backbone.hidden_states(ids, positions, None)[0, len(context) - 1 : -1]
    logits = backbone.logits(hidden)[..., : backbone.special_tokens.vocab_size].double()
    targets = ids[0, len(context) :]
    chosen = logits.log_softmax(-1).gather(-1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())
