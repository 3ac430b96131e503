"""Trains a drafter: masks after many anchors in a text predict the frozen model's next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective
from refusion_lit.learning.text_order import text_then_masks
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class GatedDraft(Objective):
    """Trains a drafter's masks to predict a frozen causal model's next tokens (``backbone.drafter``).

    An anchor, at position a, is the prompt's last token or a token of the response. The drafter's K masks follow at
    positions a+1 to a+K. They see the text up to the anchor and the anchor's earlier masks, but no masks of other
    anchors. The frozen model predicts the token at a+1 from the anchor, so mask k predicts the token at a+1+k. Many
    anchors are trained together: the frozen model runs once over the text, then all anchors' masks run in a second
    pass.

    Train on text that the model generates greedily, so that the targets are the model's tokens. The only term,
    ``draft``, is a mean over all labelled masks, weighted by ``decay``.

    Attributes:
        stride: Distance between anchors in tokens, at least 1; the first anchor is drawn at random.
        decay: Base of the weights, in (0, 1]. Mask k has weight decay^(k - 1), because a draft counts only if all
            earlier drafts are accepted.

    >>> GatedDraft(stride=4).term
    'draft'
    """

    trained = ModelTraits(attention="causal", predictions=("next_token",))
    """Traits of the frozen model: causal attention; every token predicts the next token."""

    term = "draft"
    packs = False
    ranges = {"stride": 1, "decay": "(0, 1]"}
    stride: int = 5
    decay: float = 0.8

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Append groups of masks to the text; see :meth:`Objective.corrupt`.

        Raises:
            ValueError: If the model has no drafter of adapters.
        """
        del mask_ratio  # nothing is masked
        masks = special_tokens.draft_token_ids
        fix = "set model.backbone.drafter, or train with another objective"
        expected = "a model with a drafter of adapters for GatedDraft"
        got = "a block drafter" if special_tokens.drafts_block else "a model without a drafter"
        require(bool(masks) and not special_tokens.drafts_block, "objective", expected, got, fix)
        ids = batch.input_ids
        device = ids.device
        length = ids.shape[1]

        offset = (noise.uniform("anchor", 1)[:, 0] * self.stride).long()
        num_anchors = -(-int(batch.response_lengths.amax().item()) // self.stride)
        anchors = (batch.prompt_lengths - 1 + offset)[:, None] + self.stride * torch.arange(num_anchors, device=device)
        # The masks of an anchor are adjacent.
        anchor = repeat(anchors, "batch anchor -> batch (anchor mask)", mask=len(masks))
        distance = repeat(1 + torch.arange(len(masks), device=device), "mask -> (anchor mask)", anchor=num_anchors)
        positions = anchor.clamp(min=0) + distance
        # Without a prompt, there is no token before the response to be the first anchor.
        is_real = (positions + 1 < batch.ends[:, None]) & (anchor >= 0)
        labels = ids.gather(1, (positions + 1).clamp(max=length - 1)).where(is_real, IGNORE_INDEX)
        weights = (self.decay ** (distance - 1).double()).expand_as(positions).where(is_real, 0.0)
        tokens = masks[0] + distance - 1

        joined = torch.cat((ids, tokens.expand_as(positions).where(is_real, special_tokens.pad_token_id)), 1)
        return CorruptedBatch(
            input_ids=joined,
            position_ids=torch.cat((batch.positions.expand_as(ids), positions.where(is_real, length)), 1),
            labels=F.pad(labels, (length, 0), value=IGNORE_INDEX),
            weights=F.pad(weights.float(), (length, 0)),
            terms=torch.zeros_like(joined),
            counts=weights.sum()[None],
            visible=text_then_masks(length, (anchor + 1).where(is_real, 0), (distance - 1).where(is_real, 0)),
            is_masked=torch.zeros_like(joined, dtype=torch.bool),
            num_drafts=positions.shape[1],
        )
