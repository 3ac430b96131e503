"""Which masks would be accepted as drafts, counted from validation logits: what training shows of the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

NUM_OFFSETS = 8
"""Drafts of a slot that are counted one by one; ReFusion's default slot has as many tokens."""

THRESHOLD = 0.9
"""Drafts above this probability count as confident: ReFusion's default threshold."""


@dataclass
class DraftReads:
    """The most probable token of each label's logits, chunk by chunk: right or wrong, and its probability."""

    is_right: list[Bool[Tensor, " chunk"]]
    confidence: list[Float[Tensor, " chunk"]]

    def add(self, logits: Float[Tensor, "chunk vocab"], labels: Int[Tensor, " chunk"]) -> None:
        """Read a chunk's logits."""
        best, tokens = logits.max(-1)
        self.is_right.append(tokens == labels)
        self.confidence.append((best - logits.logsumexp(-1)).exp())

    def counts(
        self, offsets: Int[Tensor, "batch token"], labelled: Bool[Tensor, "batch token"]
    ) -> Float[Tensor, "offset figure"]:
        """Return counts by offset in the slot; see :func:`draft_figures`.

        Args:
            offsets: Offset of each mask in its slot, -1 at other tokens. A slot's masks stand one after the other.
            labelled: The tokens whose logits were read, in order.
        """
        own = offsets[labelled]
        wrong = F.pad((~torch.cat(self.is_right)).long().cumsum(0), (1, 0))
        index = torch.arange(len(own), device=own.device)
        is_accepted = wrong[index + 1] == wrong[(index - own).clamp(min=0)]  # no draft before it is wrong either
        is_confident = torch.cat(self.confidence) > THRESHOLD
        figures = torch.stack((
            torch.ones_like(is_accepted), is_accepted, is_confident, is_confident & torch.cat(self.is_right)
        ), -1)  # fmt: skip
        at_offset = own[:, None] == torch.arange(NUM_OFFSETS, device=own.device)
        return at_offset.double().T @ figures.double()


def draft_figures(counts: Float[Tensor, "offset figure"]) -> dict[str, Tensor]:
    """Return the figures to log.

    * ``accepted_K``: of the slots that have K tokens, the share whose first K drafts all equal the text.
    * ``confident``: share of drafts with a probability above 0.9.
    * ``agreement``: share of the confident drafts that equal the text. On text that the model generated from left to
      right, it is the agreement of thresholded decoding with decoding from left to right.

    Args:
        counts: By offset in the slot: all drafts, those that equal the text together with all before them, confident
            ones, and confident ones that equal the text.
    """
    found = {f"accepted_{k}": row[1] / row[0] for k, row in enumerate(counts, 1) if row[0]}
    total, _, confident, right = counts.sum(0)
    return {**found, "confident": confident / total.clamp(min=1), "agreement": right / confident.clamp(min=1)}
