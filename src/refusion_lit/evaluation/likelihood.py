"""Text log-likelihood: exact for autoregressive models, estimated for masked models."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refusion_lit.families.block_diffusion.objective import three_part_ranges
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise, stable_key

Likelihood = Literal["autoregressive", "monte_carlo_masked"]


def check_likelihood(backbone: Backbone, likelihood: Likelihood, *, allow_mismatch: bool = False) -> None:
    """Refuse an estimate that does not fit the model or its training.

    Args:
        backbone: The model.
        likelihood: The estimate.
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
    if traits.prompt_is_block:
        raise ValueError(
            f"likelihood: {likelihood!r} expects a model whose blocks start at the prompt's first token, got one "
            "whose blocks start with the response; compare it by `refusion-lit test` instead."
        )
    needed = {"next_token"} if likelihood == "autoregressive" else {"mask", "mask_shifted"}
    if traits.predictions is None or needed & set(traits.predictions):
        return
    trained = ", ".join(traits.predictions) or "nothing"
    expected = " or ".join(sorted(needed))
    reason = f"likelihood: {likelihood!r} expects a model trained for {expected}, got one trained for {trained}"
    if not allow_mismatch:
        raise ValueError(f"{reason}; use the other estimate, or set allow_mismatch: true to compute this one anyway.")
    warnings.warn(reason, stacklevel=2)


@torch.no_grad()
def autoregressive(backbone: Backbone, context: Sequence[int], text: Sequence[int]) -> tuple[float, bool]:
    """Return a text's exact log-probability after a context, in nats.

    Args:
        backbone: A causal model that predicts the next token.
        context: Tokens before the text; not empty.
        text: The text's tokens.

    Returns:
        The sum over the text's tokens, and whether greedy decoding would give the text.
    """
    ids = torch.tensor([[*context, *text]], device=backbone.device)
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
    hidden = backbone.hidden_states(ids[:, :-1], positions, None)[0, len(context) - 1 :]
    return _score(backbone, hidden, ids[0, len(context) :])


@torch.no_grad()
def monte_carlo_masked(
    backbone: Backbone, context: Sequence[int], text: Sequence[int], *, num_draws: int, batch_size: int, seed: int = 0
) -> float:
    """Estimate a masked model's log-likelihood bound, in nats (LLaDA, arXiv 2502.09992, equation 6).

    A draw masks ``l`` of the ``n`` tokens and adds ``n / l`` times the log-probability of the masked tokens. The counts
    ``l`` are stratified over 1 to ``n`` as in LLaDA's program: the first count is random, the other counts follow at
    equal distances, modulo ``n``. Two differences are deliberate. All draws are stratified together instead of per
    batch, so the batch size has no influence. Distances are rounded down, not to even. Seed and text decide the draws.

    A causal model gets the known tokens first, in sequence order, as in its training; position ids give their places.
    A model that predicts a mask at the position before it gets all tokens in text order. A block-causal model sees the
    blocks before a masked block clean, as in training and decoding. Masks fall on single tokens, also for a model that
    was trained with masked slots.

    Args:
        backbone: A model that predicts its masks.
        context: Tokens before the text.
        text: The text's tokens; not empty.
        num_draws: Number of masked states, at least 1.
        batch_size: Number of masked states per forward pass.
        seed: Seeds the draws.

    Returns:
        The mean over draws.
    """
    start = len(context)
    length = len(text)
    noise = KeyedNoise(torch.tensor([stable_key("likelihood", seed, str([*context, -1, *text]))]))
    first = int(noise.uniform("count", 1)[0, 0] * length) + 1
    counts = first + torch.arange(num_draws) * length // num_draws
    counts = (counts - 1) % length + 1
    order = rearrange(noise.uniform("order", num_draws * length), "1 (draw token) -> draw token", draw=num_draws)
    is_masked = torch.zeros(num_draws, start + length, dtype=torch.bool)
    is_masked[:, start:] = order.argsort(-1).argsort(-1) < counts[:, None]
    tokens = torch.tensor([*context, *text])
    total = 0.0
    for rows in is_masked.split(batch_size):
        for row, hidden in zip(rows, _masked_states(backbone, tokens, rows), strict=True):
            value, _ = _score(backbone, hidden, tokens[row].to(hidden.device))
            total += value * length / int(row.sum())
    return total / num_draws


@torch.no_grad()
def is_greedy_text(backbone: Backbone, context: Sequence[int], text: Sequence[int]) -> bool:
    """Return whether a masked model that unmasks the most probable token in every step writes a text.

    LLaDA's check (arXiv 2502.09992 and its program): the text starts as masks, and a step makes the most probable
    prediction final. The check ends at the first token that differs from the text.

    Args:
        backbone: A model that predicts its masks.
        context: Tokens before the text.
        text: The text's tokens; not empty.
    """
    tokens = torch.tensor([*context, *text])
    start = len(context)
    is_masked = torch.arange(len(tokens)) >= start
    special = backbone.special_tokens
    while bool(is_masked.any()):
        hidden = _masked_states(backbone, tokens, is_masked[None])[0]
        logits = backbone.logits(hidden)[..., : special.vocab_size].float()
        logits[:, list(special.banned_token_ids)] = -torch.inf
        best, predicted = logits.softmax(-1).max(-1)
        chosen = int(best.argmax())
        place = int(is_masked.nonzero()[chosen])
        if int(predicted[chosen]) != int(tokens[place]):
            return False
        is_masked[place] = False
    return True


def _masked_states(
    backbone: Backbone, tokens: Int[Tensor, " token"], is_masked: Bool[Tensor, "row token"]
) -> list[Float[Tensor, "masked hidden"]]:
    """Return per row the hidden states that predict the masked tokens, in text order."""
    traits = backbone.traits
    mask_token_id = backbone.special_tokens.mask_token_id
    length = len(tokens)
    assert mask_token_id is not None
    predictions = traits.predictions or ()
    is_shifted = "mask_shifted" in predictions and "mask" not in predictions
    positions = torch.arange(length).expand(len(is_masked), -1)
    if traits.attention == "causal" and not is_shifted:
        positions = is_masked.int().argsort(dim=-1, stable=True)  # known tokens, then masks
    is_masked_at = is_masked.gather(1, positions)
    clean = tokens[positions]
    ids = clean.masked_fill(is_masked_at, mask_token_id)
    lengths = torch.full((len(is_masked),), length)
    attention = None
    if traits.attention == "block_causal":
        assert traits.block_size is not None
        attention = three_part_ranges(length, traits.block_size, lengths)
        ids = torch.cat((ids, clean), 1)
        positions = positions.repeat(1, 2)
    elif traits.attention == "bidirectional":
        attention = torch.tensor([0, length]).expand(*ids.shape, 1, 2)
    inputs = [None if tensor is None else tensor.to(backbone.device) for tensor in (ids, positions, attention)]
    hidden = backbone.hidden_states(*inputs)  # type: ignore[arg-type]
    read_at = torch.arange(length) - int(is_shifted)
    if is_shifted and traits.block_size is not None:
        # The token before a block is clean when the block is decoded.
        read_at = torch.where(torch.arange(length) % traits.block_size == 0, read_at + length, read_at)
    return [row[read_at[at].to(row.device)] for row, at in zip(hidden, is_masked_at, strict=True)]


def _score(backbone: Backbone, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[float, bool]:
    """Return the targets' log-probability, and whether all targets are the most probable tokens.

    Ids without a token, and rows added at loading (a mask token), have no probability.
    """
    special = backbone.special_tokens
    logits = backbone.logits(hidden)[..., : special.vocab_size].double()
    logits[:, sorted({*special.unused_token_ids, *backbone.new_token_ids})] = -torch.inf
    chosen = logits.log_softmax(-1).gather(-1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())
