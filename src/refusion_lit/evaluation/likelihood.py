"""Log-likelihood of a text under a model: exact for autoregressive models, estimated for masked ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange

from refusion_lit.modeling.attention import order_mask, pattern_order
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.utils.keys import stable_key

Likelihood = Literal["autoregressive", "monte_carlo_masked"]


def check(backbone: Backbone, likelihood: Likelihood, *, allow_mismatch: bool = False) -> None:
    """Refuse an estimate that a model cannot give or was not trained for.

    Args:
        backbone: The model.
        likelihood: Name of the estimate.
        allow_mismatch: Only warn if the model was trained for other predictions.

    Raises:
        ValueError: With the reason.
    """
    traits = backbone.traits
    if likelihood == "autoregressive" and traits.attention != "causal":
        raise ValueError(
            f"likelihood: 'autoregressive' expects a causal model, got one with {traits.attention} attention; "
            "use monte_carlo_masked."
        )
    if likelihood == "monte_carlo_masked" and backbone.special_tokens.mask_token_id is None:
        raise ValueError("likelihood: 'monte_carlo_masked' expects a model with a mask token; use autoregressive.")
    needed = {"next_token"} if likelihood == "autoregressive" else {"mask", "mask_shifted"}
    if traits.predictions is None or needed & set(traits.predictions):
        return
    trained = ", ".join(traits.predictions) or "nothing"
    reason = (
        f"likelihood: {likelihood!r} expects a model trained for {' or '.join(sorted(needed))}, got one trained for "
        f"{trained}"
    )
    if not allow_mismatch:
        raise ValueError(f"{reason}; use the other estimate, or set allow_mismatch: true to compute this one anyway.")
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
    return _score(backbone, hidden, ids[0, len(context) :])


@torch.no_grad()
def monte_carlo_masked(
    backbone: Backbone, context: Sequence[int], text: Sequence[int], *, num_draws: int, batch_size: int, seed: int = 0
) -> tuple[float, bool]:
    """Estimate the log-likelihood bound of a masked model, in nats (LLaDA, arXiv 2502.09992, equation 6).

    Each draw masks ``l`` of the ``n`` tokens, ``l`` uniform in 1 to ``n``, and adds ``n / l`` times the log-probability
    of the masked tokens. Draws are a function of seed and text. A causal model gets the known tokens first, in sequence
    order, as in its training; position ids say where they belong. Masks fall on single tokens, also for a model that
    was trained with masked slots.

    Args:
        backbone: A model that predicts its masks.
        context: Tokens before the text.
        text: Tokens of the text, at least one.
        num_draws: Number of masked states drawn, at least 1.
        batch_size: Number of masked states in a forward.
        seed: Seeds the draws.

    Returns:
        The mean over draws, and whether every masked token was the most probable one in every draw.
    """
    mask_token_id, traits = backbone.special_tokens.mask_token_id, backbone.traits
    assert mask_token_id is not None
    start, length = len(context), len(text)
    clean = torch.tensor([*context, *text])
    noise = KeyedNoise(torch.tensor([stable_key("likelihood", seed, str([*context, -1, *text]))]))
    counts = (noise.uniform("count", num_draws)[0] * length).long() + 1
    order = rearrange(noise.uniform("order", num_draws * length), "1 (draw token) -> draw token", draw=num_draws)
    is_masked = torch.zeros(num_draws, len(clean), dtype=torch.bool)
    is_masked[:, start:] = order.argsort(-1).argsort(-1) < counts[:, None]
    causal = traits.attention == "causal"
    predictions = traits.predictions or ()
    shifted = "mask_shifted" in predictions and "mask" not in predictions
    total, greedy = 0.0, True
    for rows in is_masked.split(batch_size):
        positions = torch.arange(len(clean)).expand(len(rows), -1)
        if causal:
            positions = rows.int().argsort(dim=-1, stable=True)  # known tokens, then masks
        masked = rows.gather(1, positions)
        tokens = clean[positions]
        ids, position_ids = tokens.masked_fill(masked, mask_token_id).to(backbone.device), positions.to(backbone.device)
        lengths = torch.full((len(rows),), len(clean), device=backbone.device)
        attention = None if causal else order_mask(pattern_order(traits, position_ids), lengths)
        hidden = backbone.hidden_states(ids, position_ids, attention)
        read_at = masked.roll(-1, dims=1) if shifted else masked
        for row, at, targets_at, row_tokens in zip(hidden, read_at, masked, tokens, strict=True):
            value, right = _score(backbone, row[at.to(row.device)], row_tokens[targets_at].to(row.device))
            total += value * length / int(targets_at.sum())
            greedy = greedy and right
    return total / num_draws, greedy


def _score(backbone: Backbone, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[float, bool]:
    """Return the log-probability of the targets, and whether each is the most probable token."""
    logits = backbone.logits(hidden)[..., : backbone.special_tokens.vocab_size].double()
    chosen = logits.log_softmax(-1).gather(-1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())
