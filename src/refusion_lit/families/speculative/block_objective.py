"""Trains a block drafter (DFlash): blocks of masks after random response tokens predict the tokens that follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective
from refusion_lit.learning.text_order import random_subset
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class BlockDraft(Objective):
    """Trains a block drafter to predict a frozen causal model's next tokens (``backbone.block_drafter``; DFlash).

    Anchors are response tokens drawn at random. A block is an anchor and the drafter's masks after it. All tokens in a
    block see one another and, through the frozen model's hidden states, the text before the anchor. A mask predicts the
    token at its own position. The frozen model runs once over the text, then the drafter runs over all blocks.

    Train on text that the model generates greedily, so that the targets are the model's tokens. The only term,
    ``draft``, is a mean over all masks inside the response, weighted by ``decay``. Source: DFlash, arXiv 2602.06036.

    Attributes:
        num_anchors: Maximum number of anchors in a response, at least 1.
        decay: Base of the weights, in (0, 1]. Mask k has weight decay^(k - 1), because a draft counts only if all
            earlier drafts are accepted. DFlash's exp(-1 / gamma) is 0.87 for blocks of 16 tokens, 0.78 for 8.

    >>> BlockDraft(num_anchors=64).term
    'draft'
    """

    trained = ModelTraits(attention="causal", predictions=("next_token",))
    """Traits of the frozen model: causal attention; every token predicts the next token."""

    term = "draft"
    packs = False
    ranges = {"num_anchors": 1, "decay": "(0, 1]"}
    num_anchors: int = 512
    decay: float = 0.87

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Append the masks of blocks to the text; see :meth:`Objective.corrupt`.

        Raises:
            ValueError: If the model has no block drafter.
        """
        del mask_ratio  # no token of the text is masked
        fix = "set model.backbone.block_drafter, or train with another objective"
        expected = "a model with a block drafter for BlockDraft"
        require(special_tokens.drafts_block, "objective", expected, "a model without a block drafter", fix)
        masks = special_tokens.draft_token_ids
        ids = batch.input_ids
        device = ids.device
        length = ids.shape[1]

        # The token after an anchor is also in the response, so that every anchor has a token to predict.
        candidates = batch.in_response & (batch.positions + 1 < batch.ends[:, None])
        order = noise.bits("anchor", length)
        chosen = random_subset(order, candidates, torch.full_like(batch.ends, self.num_anchors))
        width = min(max(int(batch.response_lengths.amax().item()) - 1, 1), self.num_anchors)
        anchors = batch.positions.where(chosen, length).sort(-1).values[:, :width]  # absent anchors stand at the end
        # The masks of an anchor are adjacent.
        anchor = repeat(anchors, "batch anchor -> batch (anchor mask)", mask=len(masks))
        distance = repeat(1 + torch.arange(len(masks), device=device), "mask -> (anchor mask)", anchor=width)
        is_real = anchor < length
        positions = (anchor + distance).where(is_real, length)
        is_labelled = positions < batch.ends[:, None]
        labels = ids.gather(1, positions.clamp(max=length - 1)).where(is_labelled, IGNORE_INDEX)
        weights = (self.decay ** (distance - 1).double()).expand_as(positions).where(is_labelled, 0.0)
        tokens = (masks[0] + distance - 1).expand_as(positions).where(is_real, special_tokens.pad_token_id)

        first = length + torch.arange(width * len(masks), device=device) - (distance - 1)  # of the masks of the block
        zero = torch.zeros_like(anchor)
        context = torch.stack((zero, (anchor + 1).where(is_real, 0)), -1)
        block = torch.stack((zero + first, zero + first + len(masks)), -1)
        text = torch.stack((torch.zeros_like(ids), batch.positions.expand_as(ids) + 1), -1)
        return CorruptedBatch(
            input_ids=torch.cat((ids, tokens), 1),
            position_ids=torch.cat((batch.positions.expand_as(ids), positions), 1),
            labels=F.pad(labels, (length, 0), value=IGNORE_INDEX),
            weights=F.pad(weights.float(), (length, 0)),
            terms=F.pad(torch.zeros_like(tokens), (length, 0)),
            counts=weights.sum()[None],
            visible=torch.cat((F.pad(text[:, :, None], (0, 0, 0, 1)), torch.stack((context, block), 2)), 1),
            is_masked=F.pad(torch.zeros_like(is_real), (length, 0)),
            num_drafts=positions.shape[1],
            draft_offsets=F.pad((distance - 1).where(is_labelled, -1), (length, 0), value=-1),
        )
