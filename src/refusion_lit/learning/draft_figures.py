"""Counts which masks a decoder would accept as drafts, from validation logits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

NUM_OFFSETS = 8
"""Number of offsets in a slot that are counted separately; ReFusion's default slot has as many tokens."""

THRESHOLD = 0.9
"""Drafts above this probability count as confident: ReFusion's default threshold."""


def read_drafts(logits: Float[Tensor, "draft vocab"], labels: Int[Tensor, " draft"]) -> Float[Tensor, "read draft"]:
    """Return whether the most probable tokens equal the labels (1 or 0), and their probabilities."""
    best, tokens = logits.max(-1)
    return torch.stack(((tokens == labels).to(logits.dtype), (best - logits.logsumexp(-1)).exp()))


def count_drafts(reads: Float[Tensor, "read draft"], offsets: Int[Tensor, " draft"]) -> Float[Tensor, "offset figure"]:
    """Return counts by offset in the slot; see :func:`draft_figures`.

    Args:
        reads: Results of :func:`read_drafts` for all labelled tokens, in order.
        offsets: The masks' offsets in their slots, -1 at other tokens. A slot's masks are consecutive.
    """
    is_right, confidence = reads[0] > 0, reads[1]
    wrong = F.pad((~is_right).long().cumsum(0), (1, 0))
    index = torch.arange(len(offsets), device=offsets.device)
    is_accepted = wrong[index + 1] == wrong[(index - offsets).clamp(min=0)]  # nor is an earlier draft wrong
    is_confident = confidence > THRESHOLD
    figures = torch.stack((torch.ones_like(is_right), is_accepted, is_confident, is_confident & is_right), -1)
    at_offset = offsets[:, None] == torch.arange(NUM_OFFSETS, device=offsets.device)
    return at_offset.double().T @ figures.double()


def draft_figures(counts: Float[Tensor, "offset figure"]) -> dict[str, Tensor]:
    """Return the figures to log.

    * ``accepted_K``: of the slots that have K tokens, the share whose first K drafts all equal the text.
    * ``confident``: share of drafts with a probability above 0.9.
    * ``agreement``: share of the confident drafts that equal the text. On text that the model generated from left to
      right, it is the agreement between thresholded decoding and left-to-right decoding.

    Args:
        counts: By offset in the slot, the numbers of: drafts; drafts that equal the text, as do all drafts before them;
            confident drafts; confident drafts that equal the text.
    """
    accepted = {f"accepted_{k}": row[1] / row[0] for k, row in enumerate(counts, 1) if row[0]}
    total, _, confident, right = counts.sum(0)
    return {**accepted, "confident": confident / total.clamp(min=1), "agreement": right / confident.clamp(min=1)}
