"""How probable a model finds a text, by two named estimates."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch

from refusion_lit.modeling.attention import order_mask
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise, stable_key

Likelihood = Literal["autoregressive", "monte_carlo_masked"]


def check(backbone: Backbone, likelihood: Likelihood, *, allow_mismatch: bool = False) -> None:
    """Refuse an estimate that a model cannot give or was not trained for.

    Args:
        backbone: The model.
        likelihood: Name of the estimate.
        allow_mismatch: Only warn, where the model was trained for other predictions.

    Raises:
        ValueError: With the reason.
    """
    if likelihood == "autoregressive" and backbone.traits.attention != "causal":
        raise ValueError(
            f"likelihood: 'autoregressive' expects a causal model, got one that attends {backbone.traits.attention}; "
            "use monte_carlo_masked."
        )
    if likelihood == "monte_carlo_masked" and backbone.special_tokens.mask_token_id is None:
        raise ValueError("likelihood: 'monte_carlo_masked' expects a model with a mask token; use autoregressive.")
    trained = backbone.traits.predictions
    needed = {"next_token"} if likelihood == "autoregressive" else {"mask", "mask_shifted"}
    if trained is None or needed & set(trained):
        return
    reason = (
        f"likelihood: {likelihood!r} expects a model trained for {' or '.join(sorted(needed))}, got one trained for "
    )
    reason += ", ".join(trained) or "nothing"
    if not allow_mismatch:
        raise ValueError(f"{reason}; use the other estimate, or set allow_mismatch: true to have it all the same.")
    warnings.warn(reason, stacklevel=2)


@torch.no_grad()
def autoregressive(backbone: Backbone, context: Sequence[int], text: Sequence[int]) -> tuple[float, bool]:
    """Return the exact log-probability of a text's tokens, each given all before it, in nats.

    Args:
        backbone: A causal model that predicts the next token.
        context: Tokens before the text, at least one.
        text: Tokens of the text.

    Returns:
        The sum, and whether each token is the most probable one.
    """
    ids = torch.tensor([[*context, *text]], device=backbone.device)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = backbone.hidden_states(ids, places, None)[0, len(context) - 1 : -1]
    return _score(backbone, hidden, ids[0, len(context) :])


@torch.no_grad()
def monte_carlo_masked(
    backbone: Backbone, context: Sequence[int], text: Sequence[int], *, num_draws: int, batch_size: int, seed: int = 0
) -> tuple[float, bool]:
    """Estimate the log-likelihood bound of a masked model, in nats (LLaDA, arXiv 2502.09992, equation 6).

    Each draw masks ``l`` of the ``n`` tokens, ``l`` uniform in 1 to ``n``, and adds ``n / l`` times the log-probability
    of what is masked. Draws are a function of seed and text. A causal model sees the known tokens first, in sequence
    order, as in its training; their positions say where they belong. Masks fall on single tokens also where training
    masked whole slots.

    Args:
        backbone: A model that predicts its masks.
        context: Tokens before the text.
        text: Tokens of the text, at least one.
        num_draws: States drawn, at least 1.
        batch_size: States that share a forward.
        seed: Seeds the draws.

    Returns:
        The mean over draws, and whether every masked token was the most probable one in every draw.
    """
    mask_token_id = backbone.special_tokens.mask_token_id
    assert mask_token_id is not None
    start, length = len(context), len(text)
    clean = torch.tensor([*context, *text])
    noise = KeyedNoise(torch.tensor([stable_key("likelihood", seed, str([*context, -1, *text]))]))
    counts = (noise.uniform("count", num_draws)[0] * length).long() + 1
    ranks = noise.uniform("order", num_draws * length).view(num_draws, length).argsort(-1).argsort(-1)
    masked = torch.zeros(num_draws, start + length, dtype=torch.bool)
    masked[:, start:] = ranks < counts[:, None]
    causal = backbone.traits.attention == "causal"
    shifted = "mask_shifted" in (backbone.traits.predictions or ()) and "mask" not in (
        backbone.traits.predictions or ()
    )
    total, greedy = 0.0, True
    for rows in masked.split(batch_size):
        places = (
            torch.argsort(rows.int(), dim=-1, stable=True) if causal else torch.arange(len(clean)).expand(len(rows), -1)
        )
        hidden_at = rows.gather(1, places)
        ids = clean[places].masked_fill(hidden_at, mask_token_id).to(backbone.device)
        positions = places.to(backbone.device)
        lengths = torch.full((len(rows),), len(clean), device=backbone.device)
        order = torch.zeros_like(positions)
        if backbone.traits.attention == "block_causal":
            assert backbone.traits.block_size is not None
            order = positions // backbone.traits.block_size
        attention = None if causal else order_mask(order, lengths)
        hidden = backbone.hidden_states(ids, positions, attention)
        read_at = hidden_at.roll(-1, dims=1) if shifted else hidden_at
        for row, at, known, order_of in zip(hidden, read_at, hidden_at, places, strict=True):
            value, right = _score(backbone, row[at.to(row.device)], clean[order_of[known]].to(row.device))
            total += value * length / int(known.sum())
            greedy = greedy and right
    return total / num_draws, greedy


def _score(backbone: Backbone, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[float, bool]:
    logits = backbone.logits(hidden)[..., : backbone.special_tokens.vocab_size].double()
    chosen = logits.log_softmax(-1).gather(-1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())
